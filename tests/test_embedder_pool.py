"""Invariant: with rows in a pool or a cache the embedder gives what it gives with rows on the items, bit for bit.

Items are found again by modality and hash, across requests and chunks; what a batch or an unfinished request uses isn't
evicted; what was evicted is encoded again, or is an error that names it.
"""

import copy
import gc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, LEVELS, Encoder, Model, feature_for, one_request, random_batch, simple_item

from mmgraph import EncoderPool, MultimodalEmbedder
from mmgraph.embedder import EncoderSpec
from mmgraph.errors import (
    EvictedError,
    MissingFeatureError,
    OptionError,
    PoolArgumentError,
    PoolCopyError,
    PoolFullError,
    RowsError,
)
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import assemble_embeddings, deepstack_add, expand_ranges
from mmgraph.planning import build_plan
from mmgraph.row_cache import RowCache, Rows, RowStore
from mmgraph.stored_rows import key_of, settle_lost

WIDTH = HIDDEN * (1 + LEVELS)
TABLE = torch.randn(9, HIDDEN)


def make_pool(rows=512, *, width=WIDTH, page_rows=4):
    return EncoderPool(rows, width, dtype=torch.float32, page_rows=page_rows)


def stores():
    return [make_pool(), RowStore(1 << 20)]


def pinned(store):
    """What is pinned, in rows or bytes, after what was lost is settled."""
    settle_lost()
    return store.stats().rows_pinned if isinstance(store, EncoderPool) else store.stats().pinned_bytes


def specs_of(batch, form):
    return {
        modality: EncoderSpec(spec.fn, deepstack=spec.deepstack, deepstack_form=form)
        for modality, spec in batch.encoders.items()
    }


def item_of(batch, item):
    """The item whose rows a twin of a precomputed one has."""
    return batch.canonicals().get((item.modality, item.hash), item)


def released(kwargs):
    rows = kwargs.get("deepstack_rows")
    if rows is not None:
        rows.release()


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("kind", [0, 1])
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_gives_what_rows_on_items_give(kind, form, seed):
    plain, stored = random_batch(seed), random_batch(seed)
    store = stores()[kind]
    expected, expected_kwargs = MultimodalEmbedder().apply(
        plain.input_ids, plain.embedding, plain.ctx, specs_of(plain, form), Model()
    )
    embedder = MultimodalEmbedder(pool=store)
    for attempt in range(2):  # the second finds everything
        calls = [len(spec.fn.calls) for spec in stored.encoders.values()]
        embeds, kwargs = embedder.apply(
            stored.input_ids, stored.embedding, stored.ctx, specs_of(stored, form), Model()
        )
        if expected is None:
            assert embeds is None
            return
        assert torch.equal(embeds, expected)
        assert kwargs.keys() == expected_kwargs.keys()
        if form == "dense":
            for name, value in kwargs.items():
                assert torch.equal(value, expected_kwargs[name])
        elif kwargs:
            hidden = torch.randn(embeds.shape)
            for level in range(LEVELS):
                one, other = (k["deepstack_rows"] for k in (kwargs, expected_kwargs))
                assert torch.equal(
                    deepstack_add(hidden, one.pool, one.row_map, level),
                    deepstack_add(hidden, other.pool, other.row_map, level),
                )
        released(kwargs)
        if attempt:
            assert [len(spec.fn.calls) for spec in stored.encoders.values()] == calls
    for item in stored.contents:
        if item not in stored.precomputed and (kind == 0 or item.hash is not None):
            assert item.encoded is None or item.encoded is item_of(stored, item).encoded
    touched = {item for _, item, _ in stored.touched()}
    assert all(item.feature is None for item in touched)
    embedder._home.unfinished.clear()
    assert pinned(store) == 0


@pytest.mark.parametrize("kind", [0, 1])
def test_another_request_finds_the_rows_by_modality_and_hash(kind):
    store, encoder = stores()[kind], Encoder()
    encoders = {Modality.IMAGE: encoder, Modality.AUDIO: Encoder()}
    results = []
    for embedder in (MultimodalEmbedder(pool=store), MultimodalEmbedder(pool=store)):
        for _ in range(2):
            item = simple_item([(1, 4)], hash=7)
            results.append(
                embedder.apply(torch.zeros(6, dtype=torch.int64), TABLE, one_request([item], 6), encoders)[0]
            )
            assert item.feature is None
            assert item.encoded is None
            del item
            gc.collect()  # rows of a shared item don't go with it
    assert len(encoder.calls) == 1
    assert all(torch.equal(result, results[0]) for result in results)
    audio = simple_item([(1, 4)], Modality.AUDIO, hash=7)
    MultimodalEmbedder(pool=store).apply(
        torch.zeros(6, dtype=torch.int64), TABLE, one_request([audio], 6), encoders
    )
    assert len(encoders[Modality.AUDIO].calls) == 1


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("hash", [None, 3])
def test_every_cut_into_chunks_gives_the_one_shot_result_and_encodes_once(kind, hash):
    def item():
        return MultimodalDataItem(
            "image", [(2, 5), (8, 10)], hash=hash, feature=feature_for(Modality.IMAGE, 1, 7)
        )

    ids = torch.arange(12) % 9
    whole, _ = MultimodalEmbedder().apply(ids, TABLE, one_request([item()], 12), {Modality.IMAGE: Encoder()})
    for cut in range(1, 12):
        store, encoder, one = stores()[kind], Encoder(), item()
        embedder = MultimodalEmbedder(pool=store)
        parts = []
        for first, last in ((0, cut), (cut, 12)):
            ctx = MultimodalForwardContext([MultimodalInputs([one])], [first], [last - first])
            part, _ = embedder.apply(ids[first:last], TABLE, ctx, {Modality.IMAGE: encoder})
            parts.append(TABLE[ids[first:last]] if part is None else part)
            touched, done = last > 2, last > 10
            held = kind == 0 or hash is not None  # a cache isn't given what is never shared
            assert len(embedder._home.unfinished) == (touched and not done and held)
        assert torch.equal(torch.cat(parts), whole)
        assert len(encoder.calls) == 1


def test_what_an_unfinished_request_uses_is_not_evicted():
    pool = make_pool(16, width=HIDDEN)
    embedder = MultimodalEmbedder(pool=pool)
    encoders = {Modality.IMAGE: Encoder()}
    begun = simple_item([(0, 7)], hash=1)
    ids = torch.zeros(4, dtype=torch.int64)
    inputs = MultimodalInputs([begun])
    embedder.apply(ids, TABLE, MultimodalForwardContext([inputs], [0], [4]), encoders)
    assert pool.stats().rows_pinned == 8
    for number in range(2, 9):  # each needs the other half
        other = simple_item([(0, 6)], hash=number, variant=number)
        embedder.apply(torch.zeros(7, dtype=torch.int64), TABLE, one_request([other], 7), encoders)
    assert pool.stats().evictions == 6
    too_large = simple_item([(0, 8)], hash=99)
    with pytest.raises(PoolFullError):
        embedder.apply(torch.zeros(9, dtype=torch.int64), TABLE, one_request([too_large], 9), encoders)
    assert too_large.feature is not None
    second, _ = embedder.apply(ids, TABLE, MultimodalForwardContext([inputs], [4], [4]), encoders)
    assert torch.equal(second, -feature_for(Modality.IMAGE, 0, 8)[4:])
    assert pool.stats().rows_pinned == 0
    embedder.apply(torch.zeros(9, dtype=torch.int64), TABLE, one_request([too_large], 9), encoders)
    assert begun.share_key not in pool


def test_a_request_that_is_given_up_lets_its_rows_go():
    pool = make_pool(16, width=HIDDEN)
    embedder = MultimodalEmbedder(pool=pool)
    item = simple_item([(0, 7)])
    ctx = MultimodalForwardContext([MultimodalInputs([item])], [0], [4])
    embedder.apply(torch.zeros(4, dtype=torch.int64), TABLE, ctx, {Modality.IMAGE: Encoder()})
    assert pool.stats().rows_pinned == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del item, ctx
        gc.collect()
        assert len(embedder._home.unfinished) == 0
    assert pool.stats().rows_pinned == 0
    assert len(pool) == 0  # nobody can ask for it again


@pytest.mark.parametrize("kind", [0, 1])
def test_an_evicted_item_is_encoded_again_or_named(kind):
    def fresh(embedder, number, encoder):
        item = simple_item([(0, 7)], hash=number, variant=number)
        embedder.apply(
            torch.zeros(8, dtype=torch.int64), TABLE, one_request([item], 8), {Modality.IMAGE: encoder}
        )
        return item

    for keep in (False, True):
        store = make_pool(8, width=HIDDEN) if kind == 0 else RowStore(8 * HIDDEN * 4)
        embedder, encoder = MultimodalEmbedder(pool=store, keep_features=keep), Encoder()
        first = fresh(embedder, 1, encoder)
        fresh(embedder, 2, encoder)  # takes its place
        assert (first.feature is not None) == keep
        again = one_request([first], 8), {Modality.IMAGE: encoder}
        if keep:
            embeds, _ = embedder.apply(torch.zeros(8, dtype=torch.int64), TABLE, *again)
            assert torch.equal(embeds, -feature_for(Modality.IMAGE, 1, 8))
            assert len(encoder.calls) == 3
            continue
        with pytest.raises(
            EvictedError, match=r"request 0, IMAGE item \(hash 0x1.*rows were evicted.*keep_features"
        ):
            embedder.apply(torch.zeros(8, dtype=torch.int64), TABLE, *again)
        first.feature = feature_for(Modality.IMAGE, 1, 8)
        embeds, _ = embedder.apply(torch.zeros(8, dtype=torch.int64), TABLE, *again)
        assert torch.equal(embeds, -feature_for(Modality.IMAGE, 1, 8))
    never = MultimodalDataItem("image", [(0, 1)], hash=9)
    with pytest.raises(MissingFeatureError, match="nor has a twin") as info:
        embedder.apply(
            torch.zeros(2, dtype=torch.int64), TABLE, one_request([never], 2), {Modality.IMAGE: encoder}
        )
    assert not isinstance(info.value, EvictedError)


def test_what_finds_no_room_fails_alone_and_keeps_its_feature():
    pool = make_pool(16, width=HIDDEN)
    items = [simple_item([(0, 7)], hash=n, variant=n) for n in range(3)]
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [8] * 3)
    embedder, encoder = MultimodalEmbedder(pool=pool), Encoder()
    with pytest.raises(PoolFullError):
        embedder.apply(torch.zeros(24, dtype=torch.int64), TABLE, ctx, {Modality.IMAGE: encoder})
    assert encoder.calls == []
    assert len(pool) == pool.stats().rows_used == 0
    result = embedder.apply_result(
        torch.zeros(24, dtype=torch.int64), TABLE, ctx, {Modality.IMAGE: encoder}, on_error="isolate"
    )
    assert list(result.failed) == [2]
    assert isinstance(result.failed[2], PoolFullError)
    assert result.failed[2].request == 2
    for number in range(2):
        assert torch.equal(result.embeds[8 * number :][:8], -feature_for(Modality.IMAGE, number, 8))
    assert [item.feature is None for item in items] == [True, True, False]
    assert len(encoder.calls) == 1
    embeds, _ = embedder.apply(
        torch.zeros(8, dtype=torch.int64), TABLE, one_request([items[2]], 8), {Modality.IMAGE: encoder}
    )
    assert torch.equal(embeds, -feature_for(Modality.IMAGE, 2, 8))


def test_a_failing_encoder_leaves_no_reservation():
    pool = make_pool(width=HIDDEN)
    item = simple_item([(0, 3)], hash=1)

    def fail(items):
        raise RuntimeError("broken")

    embedder = MultimodalEmbedder(pool=pool)
    for _ in range(2):
        with pytest.raises(Exception, match="broken"):
            embedder.apply(
                torch.zeros(4, dtype=torch.int64), TABLE, one_request([item], 4), {Modality.IMAGE: fail}
            )
        assert pool.stats().rows_used == 0
        assert item.feature is not None
    embedder.apply(
        torch.zeros(4, dtype=torch.int64), TABLE, one_request([item], 4), {Modality.IMAGE: Encoder()}
    )
    assert pool.stats().rows_pinned == 0


def test_the_same_hash_with_another_token_count_is_named():
    embedder = MultimodalEmbedder(pool=make_pool(width=HIDDEN))
    encoders = {Modality.IMAGE: Encoder()}
    embedder.apply(
        torch.zeros(4, dtype=torch.int64), TABLE, one_request([simple_item([(0, 3)], hash=1)], 4), encoders
    )
    good, bad = simple_item([(0, 1)], hash=2), simple_item([(0, 2)], hash=1)
    ctx = MultimodalForwardContext([MultimodalInputs([good]), MultimodalInputs([bad])], [0, 0], [3, 3])
    ids = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(PoolArgumentError, match=r"request 1: .*4.*3"):
        embedder.apply(ids, TABLE, ctx, encoders)
    result = embedder.apply_result(ids, TABLE, ctx, encoders, on_error="isolate")
    assert list(result.failed) == [1]
    assert torch.equal(result.embeds[:2], -feature_for(Modality.IMAGE, 0, 2))


def test_a_pool_that_is_too_narrow_is_refused_before_encoding():
    encoder = Encoder(WIDTH)
    embedder = MultimodalEmbedder(pool=make_pool(width=WIDTH - 1))
    item = simple_item([(0, 1)], feature=torch.randn(2, WIDTH))
    encoders = {Modality.IMAGE: EncoderSpec(encoder, deepstack=True)}
    with pytest.raises(PoolArgumentError, match=f"{WIDTH - 1} wide and rows are {WIDTH}"):
        embedder.apply(torch.zeros(2, dtype=torch.int64), TABLE, one_request([item], 2), encoders, Model())
    assert encoder.calls == []


@pytest.mark.parametrize("kind", [0, 1])
def test_phases_alone_do_what_apply_does(kind):
    store, encoders = stores()[kind], {Modality.IMAGE: Encoder()}
    embedder = MultimodalEmbedder(pool=store)
    items = [simple_item([(0, 3)], hash=1), simple_item([(5, 6)], variant=2)]
    ctx, ids = one_request(items, 8), torch.arange(8)
    expected, _ = MultimodalEmbedder().apply(
        ids, TABLE, one_request(copy.deepcopy(items), 8), {Modality.IMAGE: Encoder()}
    )
    plan = embedder.plan(ctx, 8)
    with pytest.raises(OptionError, match="needs the text embedding's width"):
        embedder.encode(plan, encoders, device="cpu")
    with pytest.raises(RowsError, match="encode the plan first"):
        embedder.assemble(plan, ids, TABLE, encoders)
    embedder.encode(plan, encoders, device="cpu", width=HIDDEN)
    assert pinned(store) == (8 if kind == 0 else 4 * HIDDEN * 4)  # pages of 4, or bytes of what is shared
    embeds, _ = embedder.assemble(plan, ids, TABLE, encoders)
    assert torch.equal(embeds, expected)
    again, _ = embedder.assemble(plan, ids, TABLE, encoders)  # finds them once more
    assert torch.equal(again, expected)
    assert pinned(store) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given_up = embedder.plan(ctx, 8)
        assert pinned(store) > 0
        del given_up
        assert pinned(store) == 0


def test_sparse_deepstack_rows_are_held_until_they_are_released_or_lost():
    pool = make_pool(8)
    embedder = MultimodalEmbedder(pool=pool)
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(WIDTH), deepstack=True, deepstack_form="sparse")}

    def call(number):
        item = simple_item([(0, 7)], hash=number, feature=torch.randn(8, WIDTH))
        return embedder.apply(
            torch.zeros(8, dtype=torch.int64), TABLE, one_request([item], 8), encoders, Model()
        )

    _, kwargs = call(1)
    rows = kwargs["deepstack_rows"]
    assert rows.pool.untyped_storage().data_ptr() == pool.tensor.untyped_storage().data_ptr()
    with pytest.raises(PoolFullError):
        call(2)
    rows.release()
    rows.release()
    _, kwargs = call(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kwargs.clear()
        del rows
        gc.collect()
    _, kwargs = call(3)
    released(kwargs)


def test_a_prepared_batch_is_what_a_captured_prefill_needs():
    pool = make_pool(64)
    embedder = MultimodalEmbedder(pool=pool)
    encoders = {
        Modality.IMAGE: EncoderSpec(Encoder(WIDTH), deepstack=True),
        Modality.AUDIO: Encoder(),
    }

    def batch(seed):
        image = simple_item([(1, 4)], hash=seed, feature=torch.randn(4, WIDTH))
        audio = simple_item([(6, 7)], Modality.AUDIO, variant=seed)
        return one_request([image, audio], 10)

    ranges = torch.empty(8, 3, dtype=torch.int32)
    deep_ranges = torch.empty(8, 3, dtype=torch.int32)
    for seed in range(5):
        ids, ctx = torch.randint(0, 9, (10,)), batch(seed)
        expected, kwargs = MultimodalEmbedder().apply(ids, TABLE, copy.deepcopy(ctx), encoders, Model())
        with embedder.prepare(ctx, 10, encoders, Model(), width=HIDDEN) as prepared:
            assert pool.stats().rows_pinned > 0
            ranges.copy_(torch.from_numpy(prepared.row_map.padded_ranges(8)))
            deep_ranges.copy_(torch.from_numpy(prepared.deepstack_map.padded_ranges(8)))
            hidden = assemble_embeddings(ids, TABLE, pool.tensor[:, :HIDDEN], expand_ranges(ranges, 10))
            assert torch.equal(hidden, expected)
            entries = expand_ranges(deep_ranges, 10)
            for level in range(LEVELS):
                dense = kwargs["input_deepstack_embeds"][:, level * HIDDEN : (level + 1) * HIDDEN]
                assert torch.equal(
                    deepstack_add(hidden, pool.tensor[:, HIDDEN:], entries, level), hidden + dense
                )
        assert pool.stats().rows_pinned == 0
    with embedder.prepare(
        MultimodalForwardContext([None], [0], [3]), 3, encoders, Model(), width=HIDDEN
    ) as text:
        assert text.row_map.ranges.shape == (0, 3)
        assert text.deepstack_map is None
    with pytest.raises(OptionError, match="prepare needs an EncoderPool"):
        MultimodalEmbedder().prepare(ctx, 10, encoders, width=HIDDEN)


def test_rows_of_several_runs_are_laid_out_run_by_run():
    pool = EncoderPool(24, HIDDEN, dtype=torch.float32, page_rows=2)
    embedder, encoders = MultimodalEmbedder(pool=pool), {Modality.IMAGE: Encoder()}
    small = [simple_item([(0, 3)], hash=n, variant=n) for n in range(6)]
    for item in small:
        embedder.apply(torch.zeros(4, dtype=torch.int64), TABLE, one_request([item], 4), encoders)
    for n in (0, 2, 4):
        pool.drop(small[n].share_key)
    large = simple_item([(1, 5), (7, 11)], hash=77, variant=9)
    expected = -feature_for(Modality.IMAGE, 9, 10)
    embeds, _ = embedder.apply(torch.zeros(13, dtype=torch.int64), TABLE, one_request([large], 13), encoders)
    assert pool.stats().evictions == 0
    with pool.lease() as lease:
        assert lease.pin(large.share_key, 10)
        assert len(lease.places(large.share_key).starts) == 3
    assert torch.equal(embeds[1:6], expected[:5])
    assert torch.equal(embeds[7:12], expected[5:])
    for first in range(12):  # every chunk of it
        ctx = MultimodalForwardContext([MultimodalInputs([large])], [first], [13 - first])
        part, _ = embedder.apply(torch.zeros(13 - first, dtype=torch.int64), TABLE, ctx, encoders)
        assert torch.equal(part, embeds[first:])


def test_precomputed_rows_are_stored_and_found():
    pool, embedder = make_pool(width=HIDDEN), None
    embedder = MultimodalEmbedder(pool=pool)
    rows = torch.randn(3, HIDDEN)
    item = MultimodalDataItem("image", [(0, 2)], hash=5, encoded=rows)
    ids = torch.zeros(4, dtype=torch.int64)
    for one in (item, MultimodalDataItem("image", [(0, 2)], hash=5)):
        embeds, _ = embedder.apply(ids, TABLE, one_request([one], 4), {})
        assert torch.equal(embeds[:3], rows)
    wrong = MultimodalDataItem("image", [(0, 2)], hash=6, encoded=rows[:2])
    with pytest.raises(RowsError, match="request 0"):
        embedder.apply(ids, TABLE, one_request([wrong], 4), {})


def test_options_are_checked_and_a_pool_is_not_copied():
    with pytest.raises(OptionError, match="pool must be an EncoderPool"):
        MultimodalEmbedder(pool={})
    with pytest.raises(OptionError, match="keep_features needs a pool"):
        MultimodalEmbedder(keep_features=True)
    with pytest.raises(PoolCopyError):
        copy.deepcopy(MultimodalEmbedder(pool=make_pool()))


def test_a_cache_that_declines_or_lies_harms_no_batch():
    class Odd:
        def __init__(self, rows):
            self.rows = rows

        def get(self, key):
            return self.rows

        def put(self, key, rows):
            pass

        def pin(self, key):
            return self.rows is not None

        def unpin(self, key):
            pass

    assert isinstance(Odd(None), RowCache)
    encoders, ids = {Modality.IMAGE: Encoder()}, torch.zeros(4, dtype=torch.int64)
    item = simple_item([(0, 2)], hash=1)
    embeds, _ = MultimodalEmbedder(pool=Odd(None)).apply(ids, TABLE, one_request([item], 4), encoders)
    assert torch.equal(embeds[:3], -feature_for(Modality.IMAGE, 0, 3))
    for rows, words in (
        (Rows(torch.zeros(2, HIDDEN)), r"rows torch.float32 \[2, 5\] in place of \[3, width\]"),
        (Rows(torch.zeros(3, 4)), r"rows \[3, 4\] in place of \[3, 5\]"),
        (Rows(torch.zeros(3, HIDDEN, dtype=torch.int64)), r"rows torch.int64"),
        (Rows(torch.zeros(3, HIDDEN, device="meta")), r"rows of type Tensor in place of a tensor"),
        (Rows([1]), r"rows of type list in place of a tensor"),
        (torch.zeros(3, HIDDEN), "Tensor in place of"),
    ):
        embedder = MultimodalEmbedder(pool=Odd(rows))
        good = simple_item([(0, 2)], hash=1)  # encoded anew
        embeds, _ = embedder.apply(ids, TABLE, one_request([good], 4), encoders)
        assert torch.equal(embeds[:3], -feature_for(Modality.IMAGE, 0, 3))
        bare = MultimodalDataItem("image", [(0, 2)], hash=1)
        with pytest.raises(MissingFeatureError, match=f"stored of it is {words}"):
            embedder.apply(ids, TABLE, one_request([bare], 4), encoders)


def test_a_plan_names_the_items_that_go_on_and_where():
    twin, first = simple_item([(0, 5)], hash=1), simple_item([(1, 2), (9, 9)], hash=2)
    other = MultimodalDataItem("image", [(0, 5)], hash=1)
    ctx = MultimodalForwardContext(
        [MultimodalInputs([twin]), MultimodalInputs([first]), MultimodalInputs([other])], [0, 0, 2], [6, 5, 2]
    )
    plan = build_plan(ctx, 13)
    assert list(plan.unfinished) == [(1, first, 5), (2, other, 4)]
    assert list(plan.continued) == [(2, other, 2)]
    assert list(plan.without_requests([1]).unfinished) == [(2, other, 4)]
    assert list(plan.without_requests([2]).continued) == []
    assert key_of(other) == key_of(twin)


@pytest.mark.parametrize("behaviour", ["writes", "ignores", "returns a part"])
def test_an_encoder_may_write_to_the_pool_itself(behaviour):
    outs = []

    def encoder(items, out):
        outs.append(out)
        rows = -torch.cat([item.feature for item in items])
        if behaviour == "ignores" or out is None:
            return rows
        out.copy_(rows)
        return out if behaviour == "writes" else list(out.split([4, 8]))  # joined anew

    pool = make_pool(64)
    embedder = MultimodalEmbedder(pool=pool)
    items = [simple_item([(0, 3)], hash=1, variant=1), simple_item([(5, 12)], hash=2, variant=2)]
    ids = torch.zeros(14, dtype=torch.int64)
    expected, _ = MultimodalEmbedder().apply(
        ids, TABLE, one_request(copy.deepcopy(items), 14), {Modality.IMAGE: Encoder()}
    )
    spec = {Modality.IMAGE: EncoderSpec(encoder, takes_out=True)}
    embeds, _ = embedder.apply(ids, TABLE, one_request(items, 14), spec)
    assert torch.equal(embeds, expected)
    assert outs[0].shape == (12, HIDDEN)
    assert outs[0].untyped_storage().data_ptr() == pool.tensor.untyped_storage().data_ptr()
    assert torch.equal(pool.tensor[:4, :HIDDEN], expected[:4])
    uneven = [
        simple_item([(0, 4)], hash=3, variant=1),
        simple_item([(6, 8)], hash=4, variant=2),
    ]  # 5 rows in pages of 4
    embeds, _ = embedder.apply(ids, TABLE, one_request(uneven, 14), spec)
    assert outs[1] is None
    assert torch.equal(embeds[6:9], -feature_for(Modality.IMAGE, 2, 3))
    plain = simple_item([(0, 3)], variant=1)
    embeds, _ = MultimodalEmbedder().apply(ids, TABLE, one_request([plain], 14), spec)
    assert outs[2] is None
    assert torch.equal(embeds[:4], expected[:4])


def test_a_failure_of_an_encoder_that_writes_can_be_tried_again():
    pool, tries = make_pool(64, width=HIDDEN), []

    def encoder(items, out):
        out.fill_(float("nan"))
        tries.append(len(items))
        if len(tries) == 1:
            raise RuntimeError("broken")
        out.copy_(-torch.cat([item.feature for item in items]))
        return out

    items = [simple_item([(0, 3)], hash=1, variant=1), simple_item([(4, 7)], hash=2, variant=2)]
    spec = {Modality.IMAGE: EncoderSpec(encoder, takes_out=True)}
    result = MultimodalEmbedder(pool=pool).apply_result(
        torch.zeros(8, dtype=torch.int64), TABLE, one_request(items, 8), spec, on_error="isolate"
    )
    assert result.failed == {}
    assert tries == [2, 1, 1]
    assert torch.equal(result.embeds[4:], -feature_for(Modality.IMAGE, 2, 4))
