"""Invariant: rows that are too many, too few, too wide or another item's never reach a result; nobody else suffers.

The kinds of fault that docs/faults.md lists under assembly and serving, with their siblings.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mm_batches import HIDDEN, LEVELS, Encoder, Model, image_encoder, one_request, simple_item

from mmgraph import ops
from mmgraph.embedder import EncoderSpec, MultimodalEmbedder
from mmgraph.errors import AliasError, EncoderOutputError, MultimodalError, RowsError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

TABLE = torch.arange(7 * HIDDEN, dtype=torch.float32).reshape(7, HIDDEN)
IDS = torch.zeros(12, dtype=torch.int64)

Output = Callable[[list[torch.Tensor]], Any]


def items_of(*spans: Sequence[tuple[int, int]]) -> list[MultimodalDataItem]:
    return [simple_item(list(span), variant=place, hash=place + 1) for place, span in enumerate(spans)]


def encoder(output: Output) -> dict[Modality, EncoderSpec]:
    """Gives what is made of the items' right rows."""
    return {Modality.IMAGE: EncoderSpec(lambda items: output([-item.feature for item in items]))}


def refused(items: list[MultimodalDataItem], output: Output, message: str) -> MultimodalError:
    """The call fails, the items are as before, and the next good call gives the right rows."""
    features = [item.feature for item in items]
    with pytest.raises(EncoderOutputError, match=message) as caught:
        MultimodalEmbedder().apply(IDS, TABLE, one_request(items, 12), encoder(output))
    assert [item.feature for item in items] == features
    assert all(item.encoded is None for item in items)
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request(items, 12), image_encoder())
    for item, feature in zip(items, features, strict=True):
        rows = torch.cat([embeds[start : end + 1] for start, end in item.offsets])
        assert torch.equal(rows, -feature)
    return caught.value


def longer(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows[:1]])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda rows: longer(rows[0]), r"3 rows, per item \[3\], got 4 rows"),
        (lambda rows: rows[0][:-1], r"3 rows, per item \[3\], got 2 rows"),
        (lambda rows: rows[0][:1], r"3 rows, per item \[3\], got 1 rows"),
        (lambda rows: rows[0][:0], r"3 rows, per item \[3\], got 0 rows"),
        (lambda rows: rows[0].reshape(HIDDEN, 3), r"per item \[3\], got 5 rows"),
        (lambda rows: torch.zeros(3, HIDDEN + 1), "rows of width 5, got width 6"),
        (lambda rows: torch.zeros(3, 1), "rows of width 5, got width 1"),
        (lambda rows: rows[0].reshape(1, -1), r"per item \[3\], got 1 rows"),
        (lambda rows: [longer(rows[0])], r"got 4 rows"),
        (lambda rows: longer(rows[0])[None], r"got 4 rows"),
    ],
)
@pytest.mark.parametrize("spans", [[(2, 4)], [(0, 0), (5, 6)]])
def test_one_item_s_rows_must_be_as_many_and_as_wide_as_it_needs(
    output: Output, message: str, spans: list[tuple[int, int]]
) -> None:
    assert refused(items_of(spans), output, message).request == 0


@pytest.mark.parametrize(
    "output",
    [
        lambda rows: [longer(rows[0]), rows[1][:-1]],
        lambda rows: (rows[0][:-1], longer(rows[1])),
        lambda rows: [longer(rows[0])[None], rows[1][None, :-1]],
        lambda rows: [torch.cat(rows), rows[0][:0]],
        lambda rows: rows[::-1],
    ],
)
def test_a_row_too_many_in_one_and_too_few_in_another_do_not_cancel_out(output: Output) -> None:
    refused(items_of([(0, 1)], [(4, 6)]), output, r"5 rows, per item \[2, 3\], got 5 rows, per item \[")


def test_stacks_are_counted_by_item_too() -> None:
    items = items_of([(0, 1)], [(4, 7)])
    refused(
        items,
        lambda rows: torch.cat(rows).reshape(2, 3, HIDDEN),
        r"per item \[2, 4\], got 6 rows, per item \[3, 3\]",
    )
    equal = items_of([(0, 1)], [(4, 5)])
    features = [item.feature for item in equal]
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request(equal, 12), encoder(torch.stack))
    assert torch.equal(embeds[[0, 1, 4, 5]], -torch.cat(features))


@pytest.mark.parametrize(
    "output",
    [
        lambda rows: torch.cat(rows),
        lambda rows: rows,
        lambda rows: [torch.cat(rows)],
        lambda rows: [torch.cat(rows)[:4], torch.cat(rows)[4:5], torch.cat(rows)[5:]],
        lambda rows: torch.cat(rows)[None],
        lambda rows: torch.cat(rows).reshape(3, 2, HIDDEN),
    ],
)
def test_rows_that_come_in_other_parts_than_items_are_joined(output: Output) -> None:
    items = items_of([(0, 1)], [(4, 7)])
    features = [item.feature for item in items]
    embeds, _ = MultimodalEmbedder().apply(IDS, TABLE, one_request(items, 12), encoder(output))
    assert torch.equal(embeds[[0, 1, 4, 5, 6, 7]], -torch.cat(features))


@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_counts_that_cancel_out_between_requests_fail_both_and_no_third(on_error: str) -> None:
    items = items_of([(1, 2)], [(0, 2)], [(0, 1)])
    features = [item.feature for item in items]
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)

    def crossed(given: list[MultimodalDataItem]) -> list[torch.Tensor]:
        wrong = {items[0]: longer, items[1]: lambda rows: rows[:-1]}
        return [wrong.get(item, torch.clone)(-item.feature) for item in given]

    encoders = {Modality.IMAGE: EncoderSpec(crossed)}
    if on_error == "raise":
        with pytest.raises(EncoderOutputError, match=r"per item \[2, 3, 2\], got 7 rows, per item \[3, 2, 2\]"):
            MultimodalEmbedder().apply(IDS, TABLE, ctx, encoders)
        assert all(item.encoded is None for item in items)
        return
    result = MultimodalEmbedder().apply_result(IDS, TABLE, ctx, encoders, on_error="isolate")
    assert {request: type(error) for request, error in result.failed.items()} == {
        0: EncoderOutputError,
        1: EncoderOutputError,
    }
    assert all(result.failed[request].request == request for request in (0, 1))
    assert torch.equal(result.embeds[8:10], -features[2])
    assert torch.equal(result.embeds[10:], TABLE[[0, 0]])
    assert [item.feature is feature for item, feature in zip(items, features, strict=True)] == [
        True,
        True,
        False,
    ]
    again = MultimodalEmbedder().apply_result(IDS, TABLE, ctx, image_encoder(), on_error="isolate")
    assert again.failed == {}
    assert torch.equal(again.embeds[[1, 2, 4, 5, 6, 8, 9]], -torch.cat(features))


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
@pytest.mark.parametrize("which", ["encoded", "encoded_deepstack"])
def test_rows_kept_on_an_item_are_never_stretched_or_cut(rows: int, which: str) -> None:
    kept = {"encoded": torch.zeros(3, HIDDEN), "encoded_deepstack": torch.zeros(3, LEVELS * HIDDEN)}
    kept[which] = kept[which][:1].expand(rows, -1)
    item = simple_item([(1, 3)], feature=None, **kept)
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(), deepstack=True)}
    with pytest.raises(RowsError, match=rf"{which} must be .*\[3, .*got \[{rows}, ") as caught:
        MultimodalEmbedder().apply(IDS, TABLE, one_request([item], 12), encoders, Model())
    assert caught.value.request == 0
    result = MultimodalEmbedder().apply_result(
        IDS, TABLE, one_request([item], 12), encoders, Model(), on_error="isolate"
    )
    assert list(result.failed) == [0]


@pytest.mark.parametrize("step", [-1, 1])
def test_a_twin_s_rows_are_never_stretched_or_cut(step: int) -> None:
    first, twin = simple_item([(0, 2)], hash=9), simple_item([(4, 6 + step)], hash=9)
    with pytest.raises(AliasError, match=rf"has {3 + step} tokens.*has 3"):
        MultimodalEmbedder().apply(IDS, TABLE, one_request([first, twin], 12), image_encoder())
    assert first.encoded is twin.encoded is None


def test_no_placeholders_and_no_features() -> None:
    calls = image_encoder()
    empty = MultimodalDataItem("image", [], feature=torch.zeros(0, HIDDEN))
    assert MultimodalEmbedder().apply(IDS, TABLE, one_request([empty], 12), calls) == (None, {})
    assert calls[Modality.IMAGE].fn.calls == []
    embeds = torch.arange(4.0).reshape(2, 2)
    nothing = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(ops.merge_embeddings(embeds, nothing, embeds[:0]), embeds)
    assert ops.merge_embeddings(embeds[:0], nothing[:0], embeds[:0]).shape == (0, 2)


@pytest.mark.parametrize("features", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("told", [True, False])
def test_merging_takes_one_feature_for_each_placeholder_and_no_other_number(features: int, told: bool) -> None:
    embeds, mask = torch.zeros(5, 2), torch.tensor([True, False, True, True, False])
    with pytest.raises(ops.CountMismatchError, match=f"3 placeholders but {features} feature"):
        ops.merge_embeddings(embeds, mask, torch.ones(features, 2), num_placeholders=3 if told else None)
    assert not bool(embeds.any())


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (1, 6), (3, 1)])
def test_merging_takes_no_other_width_with_as_many_elements(shape: tuple[int, int]) -> None:
    embeds, mask = torch.zeros(5, 2), torch.tensor([True, False, True, True, False])
    with pytest.raises(ops.OpError, match=r"as wide as embeds rows, 2, got"):
        ops.merge_embeddings(embeds, mask, torch.ones(shape))


@pytest.mark.parametrize("change", [(0, 1, 0), (-1, 0, 0), (0, 0, 1), (0, 1, -1)])
def test_a_map_of_a_range_that_is_one_off_outside_is_refused(change: tuple[int, int, int]) -> None:
    ends = [value + step for value, step in zip((0, 3, 0), change, strict=True)]
    with pytest.raises(ops.ArgumentError, match="must lie inside"):
        ops.RowMap.from_ranges(4, [ends[0]], [ends[1]], [ends[2]], pool_rows=4)
    assert ops.RowMap.from_ranges(4, [0], [3], [0], pool_rows=4).host.tolist() == [0, 1, 2, 3]


def test_a_map_is_not_used_with_a_smaller_pool() -> None:
    row_map = ops.RowMap.from_ranges(2, [0], [1], [1], pool_rows=3)
    ids, table = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2)
    with pytest.raises(ops.ArgumentError, match="built for a pool of 3 rows, but the pool has 2"):
        ops.assemble_embeddings(ids, table, torch.ones(2, 2), row_map)
    assert torch.equal(ops.assemble_embeddings(ids, table, torch.ones(3, 2), row_map), torch.ones(2, 2))


@pytest.mark.parametrize("token", [5, 1_000_000, 2**31 - 2, -1])
def test_placeholder_ids_that_are_generated_or_typed_are_text(token: int) -> None:
    """In text beside the span, in a text request, and in rows that decode, with media or without."""
    item = simple_item([(1, 2)], pad_value=token)
    rows = -item.feature
    inputs = MultimodalInputs([item])
    ctx = MultimodalForwardContext([inputs, None, inputs, None], [0, 0], [4, 3])
    ids = torch.full((9,), token)
    embeds, _ = MultimodalEmbedder().apply(ids, TABLE, ctx, image_encoder())
    assert torch.equal(embeds[1:3], rows)
    text = TABLE[min(max(token, 0), 6)]
    assert torch.equal(embeds[[0, 3, 4, 5, 6, 7, 8]], text.expand(7, -1))


@pytest.mark.parametrize("ids", [[3] * 6, [-5] * 6, [2**31 - 2] * 6])
def test_ids_under_a_span_may_be_another_item_s_or_none_s(ids: list[int]) -> None:
    items = items_of([(0, 1)], [(3, 5)])
    features = [item.feature for item in items]
    embeds, _ = MultimodalEmbedder(strict=True).apply(
        torch.tensor([*ids[:2], 0, *ids[3:]]), TABLE, one_request(items, 6), image_encoder()
    )
    assert torch.equal(embeds[[0, 1, 3, 4, 5]], -torch.cat(features))


DIFFERENT_FEATURES = {
    "partition": (
        [torch.arange(5.0), torch.arange(5.0, 10.0)],
        [torch.arange(10.0)],
        [torch.arange(3.0), torch.arange(3.0, 10.0)],
    ),
    "shape": (torch.arange(10.0).reshape(2, 5), torch.arange(10.0).reshape(5, 2), torch.arange(10.0)),
    "dtype of the same bytes": (
        torch.zeros(2, 5),
        torch.zeros(2, 5, dtype=torch.int32),
        np.zeros((2, 5), dtype=np.uint32),
    ),
    "list or tensor": (torch.arange(10.0), [torch.arange(10.0)], {"pixels": torch.arange(10.0)}),
}


@pytest.mark.parametrize("kind", DIFFERENT_FEATURES)
def test_items_of_the_same_bytes_and_another_form_are_encoded_apart(kind: str) -> None:
    items = [
        MultimodalDataItem("image", [(3 * place, 3 * place + 1)], feature=feature)
        for place, feature in enumerate(DIFFERENT_FEATURES[kind])
    ]
    check_apart(items)


@pytest.mark.parametrize(
    "data",
    [
        [{"grid": [1, 2, 2]}, {"grid": [1, 4, 1]}, {"grid": [[1, 2], 2]}],
        [{"grid": torch.tensor([1, 2])}, {"grid": torch.tensor([[1, 2]])}, {"grid": torch.tensor([1.0, 2.0])}],
        [{"rows": 1, "columns": 2}, {"rows": 2, "columns": 1}, {"rows": 1}],
        [{}, {"grid": None}, {"grid": []}],
    ],
)
def test_items_of_the_same_feature_and_another_grid_are_encoded_apart(data: list[dict[str, Any]]) -> None:
    feature = torch.arange(10.0).reshape(2, 5)
    items = [
        MultimodalDataItem(
            "image", [(3 * place, 3 * place + 1)], feature=feature.clone(), model_specific_data=entry
        )
        for place, entry in enumerate(data)
    ]
    check_apart(items)


def check_apart(items: list[MultimodalDataItem]) -> None:
    again = MultimodalDataItem(
        "image", [(9, 10)], feature=items[0].feature, model_specific_data=items[0].model_specific_data
    )
    for item in (*items, again):
        item.ensure_hash()
    assert len({item.pad_value for item in items}) == len(items)
    seen: list[MultimodalDataItem] = []

    def by_place(given: list[MultimodalDataItem]) -> torch.Tensor:
        seen.extend(given)
        return torch.cat([torch.full((2, HIDDEN), 10.0 + items.index(item)) for item in given])

    embeds, _ = MultimodalEmbedder().apply(
        IDS, TABLE, one_request([*items, again], 12), {Modality.IMAGE: EncoderSpec(by_place)}
    )
    assert seen == items  # and the one that is the same in every way is not encoded again
    assert embeds[[0, 3, 6, 9], 0].tolist() == [10.0, 11.0, 12.0, 10.0]
