"""Invariant: a batch cut to a budget has just as much to encode as fits, is cut before items only, and loses nothing
else; encoding a plan bit by bit gives what encoding it at once gives.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, Batch, Encoder, one_request, random_batch, simple_item

from mmgraph.budget import BudgetedBatch, fit_to_budget, limit_plan
from mmgraph.embedder import MultimodalEmbedder
from mmgraph.errors import ContextError, OptionError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.planning import build_plan

Budget = tuple[int | None, int | None]
BUDGETS = st.tuples(
    st.one_of(st.none(), st.integers(0, 12), st.integers(0, 60)), st.one_of(st.none(), st.integers(0, 6))
)


def covering(inputs: MultimodalInputs | None, position: int) -> MultimodalDataItem | None:
    for item in inputs.mm_items if inputs is not None else ():
        if item is not None and any(start <= position <= end for start, end in item.offsets):
            return item
    return None


def key_of(item: MultimodalDataItem) -> Any:
    return id(item) if item.hash is None else (item.modality, item.hash)


def oracle(batch: Batch, budget: Budget, cached: set[Any]) -> tuple[list[int], list[MultimodalDataItem], dict]:
    """Position by position: lengths, what is encoded, and the item that each cut was for."""
    most_tokens, most_items = budget
    requests = list(
        zip(batch.ctx.mm_inputs, batch.ctx.extend_prefix_lens, batch.ctx.extend_seq_lens, strict=False)
    )
    there: set[Any] = set()
    for inputs, prefix, length in requests:
        for position in range(prefix, prefix + length):
            item = covering(inputs, position)
            if item is None or key_of(item) in there or key_of(item) in cached:
                continue
            if item.encoded is None:
                break
            there.add(key_of(item))
    lengths, taken, cuts = [], [], {}
    spared: set[Any] = set()  # by an encoded twin that stays in
    for request, (inputs, prefix, length) in enumerate(requests):
        lengths.append(length)
        for position in range(prefix, prefix + length):
            item = covering(inputs, position)
            if item is None:
                continue
            if item.encoded is not None:
                spared.add(key_of(item))
            elif key_of(item) not in there | spared | cached:
                tokens = sum(other.num_tokens for other in taken) + item.num_tokens
                fits = (most_items is None or len(taken) < most_items) and (
                    most_tokens is None or tokens <= most_tokens or (not taken and most_tokens > 0)
                )
                if not fits:
                    lengths[-1], cuts[request] = position - prefix, item
                    break
                taken.append(item)
                there.add(key_of(item))
    return lengths, [item for item in taken if key_of(item) not in spared], cuts


def fitted(batch: Batch, budget: Budget, cached: set[Any]) -> BudgetedBatch:
    return fit_to_budget(
        batch.ctx,
        batch.input_ids.shape[0],
        encode_tokens=budget[0],
        encode_items=budget[1],
        cached=(lambda item: key_of(item) in cached) if cached else None,
    )


def some_cached(batch: Batch, seed: int) -> set[Any]:
    keys = sorted({key_of(item) for item in batch.contents}, key=str)
    return set(random.Random(seed).sample(keys, len(keys) // 4)) if seed % 2 else set()


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32 - 1), budget=BUDGETS)
def test_equals_the_walk_over_positions(seed: int, budget: Budget) -> None:
    batch = random_batch(seed)
    cached = some_cached(batch, seed)
    result = fitted(batch, budget, cached)
    lengths, taken, cuts = oracle(batch, budget, cached)
    assert list(result.extend_seq_lens) == lengths
    assert list(result.ctx.extend_seq_lens) == lengths
    assert list(result.items) == taken
    assert result.encode_items == len(taken)
    assert result.encode_tokens == sum(item.num_tokens for item in taken)
    assert result.cuts == cuts


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32 - 1), budget=BUDGETS)
def test_what_comes_out_has_that_much_to_encode(seed: int, budget: Budget) -> None:
    batch = random_batch(seed)
    cached = some_cached(batch, seed)
    result = fitted(batch, budget, cached)
    plan = build_plan(result.ctx, result.num_tokens)
    misses = [
        item for items in plan.misses_by_modality.values() for item in items if key_of(item) not in cached
    ]
    assert set(misses) == set(result.items)
    assert budget[1] is None or len(misses) <= budget[1]
    if budget[0] is not None and result.encode_tokens > budget[0]:
        assert len(misses) == 1
        assert budget[0] > 0
    before = [max(length, 0) for length in batch.ctx.extend_seq_lens]
    after = [max(length, 0) for length in result.extend_seq_lens]
    assert batch.input_ids.shape[0] - result.num_tokens == sum(before) - sum(after)
    for request, (long, short) in enumerate(zip(before, after, strict=True)):
        assert (short < long) == (request in result.cuts)
        if request in result.cuts:  # not inside an item, unless the chunk began there
            edge = batch.ctx.extend_prefix_lens[request] + short
            assert covering(batch.ctx.mm_inputs[request], edge) is result.cuts[request]
            assert short == 0 or any(start == edge for start, _ in result.cuts[request].offsets)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), budget=BUDGETS)
def test_steps_within_a_budget_come_to_an_end_and_encode_each_item_once(seed: int, budget: Budget) -> None:
    assume(0 not in budget)
    batch = random_batch(seed)
    needed = {item for _, item, _ in batch.touched() if item.encoded is None}
    lengths = [max(length, 0) for length in batch.ctx.extend_seq_lens]
    ctx = dataclasses.replace(batch.ctx, extend_seq_lens=lengths)
    encoded: list[MultimodalDataItem] = []
    while any(ctx.extend_seq_lens):
        result = fit_to_budget(ctx, sum(ctx.extend_seq_lens), encode_tokens=budget[0], encode_items=budget[1])
        assert any(result.extend_seq_lens), "a step without progress"
        encoded += result.items
        for item in result.items:
            item.encoded = torch.zeros(item.num_tokens, HIDDEN)
        now = result.extend_seq_lens
        ctx = dataclasses.replace(
            ctx,
            extend_prefix_lens=[p + n for p, n in zip(ctx.extend_prefix_lens, now, strict=True)],
            extend_seq_lens=[left - n for left, n in zip(ctx.extend_seq_lens, now, strict=True)],
        )
    assert len(encoded) == len(set(encoded))
    assert set(encoded) <= needed


def three(first: int, second: int, third: int) -> tuple[list[MultimodalDataItem], MultimodalForwardContext]:
    """Three requests, each with two rows of text, an item of so many rows, and one row of text."""
    items = [simple_item([(2, 1 + tokens)], variant=tokens) for tokens in (first, second, third)]
    ctx = MultimodalForwardContext(
        [MultimodalInputs([item]) for item in items], [0] * 3, [item.num_tokens + 3 for item in items]
    )
    return items, ctx


def test_later_requests_use_what_is_left() -> None:
    items, ctx = three(4, 6, 3)
    result = fit_to_budget(ctx, 22 + 2, encode_tokens=7)
    assert result.extend_seq_lens == (7, 2, 6)
    assert result.items == (items[0], items[2])
    assert result.cuts == {1: items[1]}
    assert result.num_tokens == 24 - 7


def test_an_item_larger_than_the_budget_goes_alone() -> None:
    items, ctx = three(9, 1, 2)
    result = fit_to_budget(ctx, 21, encode_tokens=5)
    assert result.items == (items[0],)
    assert result.extend_seq_lens == (12, 2, 2)
    items, ctx = three(1, 9, 2)
    assert fit_to_budget(ctx, 21, encode_tokens=5).items == (items[0], items[2])


def test_a_budget_of_zero_takes_nothing() -> None:
    items, ctx = three(9, 1, 2)
    for budget in ({"encode_tokens": 0}, {"encode_items": 0}):
        result = fit_to_budget(ctx, 21, **budget)
        assert result.items == ()
        assert result.cuts == dict(enumerate(items))


def test_without_a_budget_nothing_is_cut() -> None:
    items, ctx = three(9, 1, 2)
    result = fit_to_budget(ctx, 21)
    assert (result.extend_seq_lens, result.items, result.cuts) == ((12, 4, 5), tuple(items), {})


def test_an_encoded_twin_that_is_cut_off_helps_nobody() -> None:
    wanted, encoded = (
        simple_item([(0, 3)], hash=1),
        simple_item([(5, 8)], hash=1, encoded=torch.zeros(4, HIDDEN)),
    )
    big = simple_item([(0, 3)], variant=2)
    inputs = [MultimodalInputs([wanted]), MultimodalInputs([big, encoded])]
    ctx = MultimodalForwardContext(inputs, [0, 0], [4, 9])
    result = fit_to_budget(ctx, 13, encode_tokens=4)
    assert result.items == (wanted,)
    assert result.extend_seq_lens == (4, 0)
    inputs[1] = MultimodalInputs([encoded])  # now nothing can cut it off
    result = fit_to_budget(MultimodalForwardContext(inputs, [0, 0], [4, 9]), 13, encode_tokens=0)
    assert result.items == ()
    assert result.cuts == {}


def test_a_cached_item_does_not_cut_off_an_encoded_twin() -> None:
    wanted, encoded = (
        simple_item([(0, 3)], hash=1),
        simple_item([(5, 8)], hash=1, encoded=torch.zeros(4, HIDDEN)),
    )
    held = simple_item([(0, 3)], variant=2)
    ctx = MultimodalForwardContext(
        [MultimodalInputs([wanted]), MultimodalInputs([held, encoded])], [0, 0], [4, 9]
    )
    result = fit_to_budget(ctx, 13, encode_tokens=0, cached=lambda item: item is held)
    assert (result.items, result.cuts) == ((), {})


def test_lengths_may_be_a_tensor_and_wrong_ones_are_the_plan_s_errors() -> None:
    _, ctx = three(4, 6, 3)
    tensors = dataclasses.replace(ctx, extend_seq_lens=torch.tensor([7, 9, 6]))
    assert fit_to_budget(tensors, 22, encode_items=1).extend_seq_lens == (7, 2, 2)
    with pytest.raises(ContextError, match="sum to 22 rows"):
        fit_to_budget(ctx, 21, encode_items=1)
    empty = fit_to_budget(MultimodalForwardContext(), 5, encode_items=1)
    assert (empty.extend_seq_lens, empty.num_tokens) == ((), 5)


@pytest.mark.parametrize("amount", [-1, 1.5, True, "4"])
@pytest.mark.parametrize("name", ["encode_tokens", "encode_items"])
def test_a_wrong_budget_is_refused(name: str, amount: object) -> None:
    _, ctx = three(4, 6, 3)
    with pytest.raises(OptionError, match=f"{name} must be an int of at least 0.*got"):
        fit_to_budget(ctx, 22, **{name: amount})
    with pytest.raises(OptionError, match=f"{name} must be an int of at least 1.*got 0"):
        limit_plan(build_plan(ctx, 22), **{name: 0})


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 20), items=st.one_of(st.none(), st.integers(1, 4)))
def test_a_plan_encoded_bit_by_bit_gives_the_same(seed: int, tokens: int, items: int | None) -> None:
    whole, parts = random_batch(seed, deepstack=False), random_batch(seed, deepstack=False)
    expected, _ = MultimodalEmbedder().apply(whole.input_ids, whole.embedding, whole.ctx, whole.encoders)
    embedder = MultimodalEmbedder()
    plan = embedder.plan(parts.ctx, parts.input_ids.shape[0])
    order = [item for item in plan.items if item.encoded is None]
    steps: list[list[MultimodalDataItem]] = []
    while (part := limit_plan(plan, encode_tokens=tokens, encode_items=items)).misses_by_modality:
        now = [item for missing in part.misses_by_modality.values() for item in missing]
        steps.append([item for item in order if item in now])
        assert len(now) == 1 or sum(item.num_tokens for item in now) <= tokens
        assert items is None or len(now) <= items
        embedder.encode(part, parts.encoders, device="cpu")
        assert all(item.encoded is not None for item in now)
    assert [item for step in steps for item in step] == order
    embeds, _ = embedder.assemble(plan, parts.input_ids, parts.embedding, parts.encoders)
    assert (embeds is None) == (expected is None)
    assert embeds is None or torch.equal(embeds, expected)


def test_the_first_misses_are_those_touched_first_whatever_their_modality() -> None:
    audio = simple_item([(0, 1)], Modality.AUDIO)
    images = [simple_item([(3, 4)]), simple_item([(6, 7)], variant=2)]
    plan = build_plan(one_request([images[0], audio, images[1]], 9), 9)
    part = limit_plan(plan, encode_items=2)
    assert part.misses_by_modality == {Modality.AUDIO: [audio], Modality.IMAGE: [images[0]]}
    assert part.scatter_ranges == plan.scatter_ranges
    encoders = {modality: Encoder() for modality in Modality}
    MultimodalEmbedder().encode(part, encoders, device="cpu")
    assert limit_plan(plan, encode_items=2).misses_by_modality == {Modality.IMAGE: [images[1]]}
