"""Invariant: the oracle gives what was worked out by hand."""

import torch

from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.testing import SourceRange, reference
from mmgraph.testing.reference import ExpectedRange

TABLE = torch.tensor([[0.0], [1.0], [2.0]])
IDS = torch.tensor([2, -7, 1, 99])


def item(offsets: list[tuple[int, int]], modality: str = "image", **fields: object) -> MultimodalDataItem:
    return MultimodalDataItem(modality, offsets, **fields)


def test_ranges_by_hand() -> None:
    sources = [torch.tensor([[10.0], [11.0]]), torch.tensor([[20.25]], dtype=torch.float64)]
    ranges = [SourceRange(1, 2, 0, 0), SourceRange(2, 2, 1, 0)]
    assert reference.assemble(IDS, TABLE, sources, []).tolist() == [[2.0], [0.0], [1.0], [2.0]]
    got = reference.assemble(IDS, TABLE, sources, ranges)
    assert got.tolist() == [[2.0], [10.0], [20.25], [2.0]]
    assert got.dtype == TABLE.dtype
    assert reference.assemble(IDS, TABLE, sources, ranges[::-1]).tolist() == [[2.0], [10.0], [11.0], [2.0]]
    half = reference.assemble(IDS, TABLE.half(), [torch.tensor([[1e5], [1 / 3]])], ranges[:1])
    assert half.tolist() == [[2.0], [float("inf")], [torch.tensor(1 / 3).half().item()], [2.0]]
    assert reference.assemble(IDS[:0], TABLE, [], []).shape == (0, 1)


def test_maps_and_masks_by_hand() -> None:
    pool = torch.tensor([[10.0], [11.0]])
    assert reference.assemble_map(IDS, TABLE, pool, [-1, 1, 1, 0]).tolist() == [[2.0], [11.0], [11.0], [10.0]]
    embeds = torch.tensor([[1.0], [2.0], [3.0]])
    assert reference.merge(embeds, [False, True, True], pool).tolist() == [[1.0], [10.0], [11.0]]


def test_deepstack_by_hand() -> None:
    pool = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert reference.deepstack_dense(pool, [-1, 1, 0], torch.float64).tolist() == [[0, 0], [3, 4], [1, 2]]
    hidden = torch.tensor([[10.0], [20.0], [30.0]])
    assert reference.deepstack_add(hidden, pool, [-1, 1, 0], 1).tolist() == [[10.0], [24.0], [32.0]]


def test_gradients_by_hand() -> None:
    sources = [torch.zeros(2, 1)]
    gradient = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    ranges = [SourceRange(0, 0, 0, 1), SourceRange(2, 2, 0, 1)]
    of_table, of_sources = reference.assemble_gradients(gradient, IDS, TABLE, sources, ranges)
    assert of_table.tolist() == [[2.0], [0.0], [8.0]]
    assert [rows.tolist() for rows in of_sources] == [[[0.0], [5.0]]]
    assert of_table.dtype == torch.float64
    of_embeds, of_features = reference.merge_gradients(
        gradient[:3], torch.zeros(3, 1), [True, False, True], torch.zeros(2, 1)
    )
    assert of_embeds.tolist() == [[0.0], [2.0], [0.0]]
    assert of_features.tolist() == [[1.0], [4.0]]


def test_a_plan_by_hand() -> None:
    cut = item([(1, 2), (5, 8)], hash=1)
    twin = item([(0, 5)], hash=1)
    ready = item([(6, 11)], hash=1, encoded=torch.zeros(6, 1))
    sound = item([(1, 1)], "audio", hash=1)
    alone, far = item([(3, 3)]), item([(40, 40)])
    ctx = MultimodalForwardContext(
        [
            MultimodalInputs([cut, None, far]),
            None,
            MultimodalInputs([twin]),
            MultimodalInputs([ready, alone, sound]),
            MultimodalInputs([alone]),
        ],
        [6, 3, 0, 0],
        [5, 1, 0, 8],
    )
    plan = reference.plan(ctx)
    assert plan.ranges == (
        ExpectedRange(0, 2, ready, 3, 5, 0),
        ExpectedRange(7, 7, sound, 0, 0, 3),
        ExpectedRange(9, 9, alone, 0, 0, 3),
        ExpectedRange(12, 13, ready, 0, 1, 3),
    )
    assert plan.canonicals == (ready, sound, alone)
    assert plan.aliases == {ready: [cut]}
    assert plan.misses == {Modality.AUDIO: [sound], Modality.IMAGE: [alone]}


def test_a_batch_by_hand() -> None:
    first, twin = item([(1, 2)], hash=5), item([(0, 1)], hash=5)
    ctx = MultimodalForwardContext([MultimodalInputs([first]), MultimodalInputs([twin])], [0, 0], [3, 1])
    rows = {first: torch.tensor([[10.0, 7.0], [11.0, 8.0]]), twin: torch.full((2, 2), 99.0)}
    assert reference.embed(IDS, TABLE, ctx, rows).tolist() == [[2.0], [10.0], [11.0], [10.0]]
    deep = {entry: contents[:, 1:] for entry, contents in rows.items()}
    dense = reference.embed_deepstack(4, ctx, deep, width=1, dtype=torch.float32)
    assert dense.tolist() == [[0.0], [7.0], [8.0], [7.0]]
    assert reference.embed_deepstack(4, ctx, {}, width=1, dtype=torch.float32).tolist() == [[0.0]] * 4
