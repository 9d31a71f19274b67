"""Invariant: whatever happens between a plan and its assembly, no row of another item is read and no pin is lost.

Failures, retries, plans that are given up, phases called one by one, limited plans, threads, requests that share items,
hashes, widths and features that change, caches that fail.
"""

import copy
import gc
import pickle
import threading

import pytest
import torch
from mm_batches import HIDDEN, LEVELS, Encoder, Handle, Model, feature_for, one_request, simple_item

from mmgraph import EncoderPool, MultimodalEmbedder, fit_to_budget, limit_plan
from mmgraph.embedder import EncoderSpec
from mmgraph.errors import (
    EncoderFailedError,
    MissingFeatureError,
    MultimodalError,
    OptionError,
    PoolArgumentError,
    PoolFullError,
    RowsError,
)
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.row_cache import Rows, RowStore
from mmgraph.stored_rows import settle_lost

WIDE = HIDDEN * (1 + LEVELS)
TABLE = torch.randn(9, HIDDEN)
IMAGE = {Modality.IMAGE: Encoder()}


def zeros(count):
    return torch.zeros(count, dtype=torch.int64)


def make(kind, rows=64, width=HIDDEN):
    if kind == "pool":
        return EncoderPool(rows, width, dtype=torch.float32, page_rows=4)
    return RowStore(rows * width * 4)


def pinned(store):
    gc.collect()
    settle_lost()
    return store.stats().rows_pinned if isinstance(store, EncoderPool) else store.stats().pinned_bytes


def chunk(item, first, last):
    return MultimodalForwardContext([MultimodalInputs([item])], [first], [last - first])


def fail(items):
    raise RuntimeError("broken")


KINDS = pytest.mark.parametrize("kind", ["pool", "cache"])
HOMES = pytest.mark.parametrize("kind", ["items", "pool", "cache"])


@HOMES
def test_a_plan_can_be_encoded_again_after_its_encoder_failed(kind):
    store = None if kind == "items" else make(kind, 8)
    embedder = MultimodalEmbedder(pool=store)
    item = simple_item([(0, 7)], hash=1)
    plan = embedder.plan(one_request([item], 8), 8)
    for _ in range(2):
        with pytest.raises(EncoderFailedError, match="can be tried again"):
            embedder.encode(plan, {Modality.IMAGE: fail}, device="cpu", width=HIDDEN)
        assert item.feature is not None
    if kind == "pool":
        assert store.stats().rows_used == 0  # another batch may have the room meanwhile
    embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)
    embeds, _ = embedder.assemble(plan, zeros(8), TABLE, IMAGE)
    assert torch.equal(embeds, -feature_for(Modality.IMAGE, 0, 8))


@HOMES
def test_a_limited_plan_comes_to_its_end_and_holds_what_it_has_encoded(kind):
    store = None if kind == "items" else make(kind, 12)
    embedder, encoder = MultimodalEmbedder(pool=store), Encoder()
    items = [simple_item([(0, 3)], hash=n, variant=n) for n in range(3)]
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)
    plan = embedder.plan(ctx, 12)
    steps = 0
    while (part := limit_plan(plan, encode_items=1)).misses_by_modality:
        embedder.encode(part, {Modality.IMAGE: encoder}, device="cpu", width=HIDDEN)
        del part
        steps += 1
        assert steps <= 3
        other = simple_item([(0, 3)], hash=99 + steps)
        if kind == "pool" and steps == 3:
            with pytest.raises(PoolFullError):
                embedder.apply(zeros(4), TABLE, one_request([other], 4), IMAGE)
    assert [len(call) for call in encoder.calls] == [1, 1, 1]
    embeds, _ = embedder.assemble(plan, zeros(12), TABLE, IMAGE)
    assert torch.equal(embeds, torch.cat([-feature_for(Modality.IMAGE, n, 4) for n in range(3)]))
    if store is not None:
        assert pinned(store) == 0


@KINDS
def test_phases_hold_unfinished_items_as_apply_does(kind):
    store = make(kind, 8)
    embedder = MultimodalEmbedder(pool=store)
    item = simple_item([(0, 7)], hash=1)
    for first, last in ((0, 4), (4, 8)):
        plan = embedder.plan(chunk(item, first, last), 4)
        embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)
        embeds, _ = embedder.assemble(plan, zeros(4), TABLE, IMAGE)
        assert torch.equal(embeds, -feature_for(Modality.IMAGE, 0, 8)[first:last])
        del plan
        assert (pinned(store) > 0) == (last < 8)
        other = simple_item([(0, 7)], hash=2)
        result = embedder.apply_result(zeros(8), TABLE, one_request([other], 8), IMAGE, on_error="isolate")
        assert bool(result.failed) == (kind == "pool" and last < 8)


@KINDS
def test_requests_that_share_an_item_each_have_their_hold(kind):
    store = make(kind, 8)
    embedder = MultimodalEmbedder(pool=store)
    item = simple_item([(0, 7)], hash=1)
    embedder.apply(zeros(4), TABLE, chunk(item, 0, 4), IMAGE)
    embedder.apply(zeros(8), TABLE, chunk(item, 0, 8), IMAGE)  # a sibling, which comes to its end
    assert pinned(store) > 0
    embedder.apply_result(
        zeros(8), TABLE, one_request([simple_item([(0, 7)], hash=2)], 8), IMAGE, on_error="isolate"
    )
    embeds, _ = embedder.apply(zeros(4), TABLE, chunk(item, 4, 8), IMAGE)
    assert torch.equal(embeds, -feature_for(Modality.IMAGE, 0, 8)[4:])
    assert pinned(store) == 0


@KINDS
def test_a_request_that_is_given_up_is_forgotten_by_its_item_or_by_a_call(kind):
    store = make(kind, 8)
    embedder = MultimodalEmbedder(pool=store)
    encoders = {Modality.IMAGE: lambda items: -torch.cat([one.feature for one in items])}
    item = simple_item([(0, 7)], hash=1)
    inputs = MultimodalInputs([item])
    embedder.apply(zeros(4), TABLE, MultimodalForwardContext([inputs], [0], [4]), encoders)
    assert pinned(store) > 0
    embedder.forget(inputs)
    assert pinned(store) == 0
    embedder.apply(zeros(4), TABLE, MultimodalForwardContext([inputs], [0], [4]), encoders)
    del item, inputs
    assert pinned(store) == 0  # without a call of the embedder
    other = MultimodalEmbedder(pool=store)
    other.apply(zeros(8), TABLE, one_request([simple_item([(0, 7)], hash=2)], 8), IMAGE)


@KINDS
def test_plans_records_and_embedders_that_are_lost_leave_no_pin(kind):
    store = make(kind, 64, WIDE)
    specs = {Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True, deepstack_form="sparse")}

    def item(number):
        return simple_item([(0, 3)], hash=number, feature=torch.randn(4, WIDE))

    embedder = MultimodalEmbedder(pool=store)
    _, kwargs = embedder.apply(zeros(4), TABLE, one_request([item(1)], 4), specs, Model())
    assert pinned(store) > 0
    kwargs.clear()
    assert pinned(store) == 0
    plan = embedder.plan(one_request([item(1)], 4), 4)
    assert pinned(store) > 0
    del plan
    assert pinned(store) == 0
    plan = embedder.plan(
        one_request([item(1), simple_item([(5, 6)], hash=3, feature=torch.randn(2, WIDE))], 8), 8
    )
    with pytest.raises(EncoderFailedError):
        embedder.encode(
            plan, {Modality.IMAGE: EncoderSpec(fail, deepstack=True)}, Model(), device="cpu", width=HIDDEN
        )
    del plan
    assert pinned(store) == 0
    begun = item(2)
    embedder.apply(zeros(2), TABLE, chunk(begun, 0, 2), specs, Model())[1]["deepstack_rows"].release()
    assert pinned(store) > 0
    del embedder, begun
    assert pinned(store) == 0


@KINDS
def test_errors_leave_no_pin_while_they_are_looked_at(kind):
    store = make(kind)
    embedder = MultimodalEmbedder(pool=store)
    embedder.apply(zeros(4), TABLE, one_request([simple_item([(0, 3)], hash=1)], 4), IMAGE)
    items = [simple_item([(0, 3)], hash=1), simple_item([(4, 7)], hash=2)]
    with pytest.raises(EncoderFailedError) as kept:
        embedder.apply(zeros(8), TABLE, one_request(items, 8), {Modality.IMAGE: fail})
    assert kept.value.__traceback__ is not None  # holds the frames, and all that is in them
    assert pinned(store) == 0
    if kind == "pool":
        with pytest.raises(EncoderFailedError) as kept:
            embedder.prepare(one_request(items, 8), 8, {Modality.IMAGE: fail}, width=HIDDEN)
        assert pinned(store) == 0


@KINDS
def test_rows_of_other_columns_are_not_used(kind):
    """Else columns that were never written are another item's rows."""
    store = make(kind, 4, WIDE)
    embedder = MultimodalEmbedder(pool=store)
    deep = {Modality.IMAGE: EncoderSpec(Encoder(WIDE), deepstack=True)}
    first = simple_item([(0, 3)], hash=1, feature=torch.randn(4, WIDE))
    embedder.apply(zeros(4), TABLE, one_request([first], 4), deep, Model())
    rows, deep_rows = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN * LEVELS)
    mine = MultimodalDataItem("image", [(0, 3)], hash=2, encoded=rows, encoded_deepstack=deep_rows)
    embedder.apply(zeros(4), TABLE, one_request([mine], 4), {})
    _, kwargs = embedder.apply(zeros(4), TABLE, one_request([mine], 4), deep, Model())
    assert torch.equal(kwargs["input_deepstack_embeds"], deep_rows)
    mine.encoded_deepstack = None
    plain = simple_item([(0, 3)], hash=3, feature=torch.randn(4, HIDDEN))
    embedder.apply(zeros(4), TABLE, one_request([plain], 4), IMAGE)
    with pytest.raises(MissingFeatureError, match="what is stored of it is"):
        embedder.apply(zeros(4), TABLE, one_request([plain], 4), deep, Model())
    plan = embedder.plan(one_request([simple_item([(0, 3)], hash=4)], 4), 4)
    embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)
    with pytest.raises(MultimodalError):
        embedder.assemble(plan, zeros(4), TABLE, deep, Model())
    del plan
    wide = MultimodalEmbedder(pool=make(kind, 4, 8))
    item = MultimodalDataItem("image", [(0, 3)], hash=5, feature=torch.randn(4, 8))
    eight = {Modality.IMAGE: lambda items: torch.cat([one.feature for one in items])}
    plan = wide.plan(one_request([item], 4), 4)
    wide.encode(plan, eight, device="cpu", width=8)
    with pytest.raises(MultimodalError):
        wide.assemble(plan, zeros(4), TABLE, eight)


@pytest.mark.parametrize("page_rows", [1, 4])
def test_a_plan_whose_item_has_shrunk_reads_no_neighbour_s_rows(page_rows):
    pool = EncoderPool(64, HIDDEN, dtype=torch.float32, page_rows=page_rows)
    embedder = MultimodalEmbedder(pool=pool)
    item = simple_item([(0, 3)], hash=1)
    plan = embedder.plan(one_request([item], 4), 4)
    item.offsets, item.feature = [(0, 2)], feature_for(Modality.IMAGE, 0, 3)
    embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)
    embedder.apply(zeros(4), TABLE, one_request([simple_item([(0, 3)], hash=2, variant=5)], 4), IMAGE)
    with pytest.raises(RowsError, match="has 3 rows in the pool and the plan uses more"):
        embedder.assemble(plan, zeros(4), TABLE, IMAGE)


@HOMES
def test_plans_are_copied_and_pickled_without_their_rows(kind):
    store = None if kind == "items" else make(kind)
    embedder = MultimodalEmbedder(pool=store)
    item = simple_item([(0, 3)], hash=1)
    embedder.apply(zeros(4), TABLE, one_request([item], 4), IMAGE)
    plan = embedder.plan(one_request([item], 4), 4)
    expected, _ = embedder.assemble(plan, zeros(4), TABLE, IMAGE)
    plan = embedder.plan(one_request([item], 4), 4)
    for made in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert "_kept" not in vars(made)
        assert list(made.dst_start) == [0]
        assert torch.equal(embedder.assemble(made, zeros(4), TABLE, IMAGE)[0], expected)
    assert torch.equal(embedder.assemble(plan, zeros(4), TABLE, IMAGE)[0], expected)


@KINDS
def test_a_precomputed_item_that_can_not_be_stored_fails_alone(kind):
    good = simple_item([(0, 3)], hash=1)
    bad = MultimodalDataItem(
        "image", [(0, 3)], hash=2, encoded=torch.randn(3, HIDDEN), feature=torch.randn(4, HIDDEN)
    )
    graded = MultimodalDataItem("image", [(0, 3)], hash=3, encoded=torch.randn(4, HIDDEN, requires_grad=True))
    ctx = MultimodalForwardContext([MultimodalInputs([one]) for one in (good, bad, graded)], [0] * 3, [4] * 3)
    result = MultimodalEmbedder(pool=make(kind)).apply_result(zeros(12), TABLE, ctx, IMAGE, on_error="isolate")
    assert list(result.failed) == ([1, 2] if kind == "pool" else [1])
    assert torch.equal(result.embeds[:4].detach(), -feature_for(Modality.IMAGE, 0, 4))
    assert bad.feature is not None


def test_rows_that_need_a_gradient_are_refused_with_the_remedy_and_the_request():
    weight = torch.ones(1, requires_grad=True)
    item = simple_item([(0, 3)], hash=1)
    embedder = MultimodalEmbedder(pool=make("pool"))
    encoders = {Modality.IMAGE: lambda items: items[0].feature * weight}
    with pytest.raises(PoolArgumentError, match=r"request 0.*inference_mode") as info:
        embedder.apply(zeros(4), TABLE, one_request([item], 4), encoders)
    assert info.value.request == 0
    assert item.feature is not None
    with torch.no_grad():
        embedder.apply(zeros(4), TABLE, one_request([item], 4), encoders)


def test_the_first_error_of_an_item_is_the_one_that_is_told():
    embedder = MultimodalEmbedder(pool=make("pool"))
    embedder.apply(zeros(4), TABLE, one_request([simple_item([(0, 3)], hash=1)], 4), IMAGE)
    for encoders in (IMAGE, {}):
        bare = MultimodalDataItem("image", [(0, 4)], hash=1)
        with pytest.raises(PoolArgumentError, match=r"4.*5|5.*4"):
            embedder.apply(zeros(5), TABLE, one_request([bare], 5), encoders)


@HOMES
def test_a_hash_that_is_set_in_a_batch_harms_it_not(kind):
    store = None if kind == "items" else make(kind)
    embedder = MultimodalEmbedder(pool=store)
    item = simple_item([(0, 3)])

    def encoder(items):
        items[0].ensure_hash()
        return -items[0].feature

    expected = -feature_for(Modality.IMAGE, 0, 4)
    embeds, _ = embedder.apply(zeros(4), TABLE, one_request([item], 4), {Modality.IMAGE: encoder})
    assert torch.equal(embeds, expected)
    other = simple_item([(0, 3)], hash=5)
    plan = embedder.plan(one_request([other], 4), 4)
    embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)
    other.hash = 9
    assert torch.equal(embedder.assemble(plan, zeros(4), TABLE, IMAGE)[0], expected)


@pytest.mark.parametrize(
    ("kind", "keep"), [("items", False), ("pool", False), ("pool", True), ("cache", False), ("cache", True)]
)
def test_an_item_without_a_hash_may_be_given_new_contents(kind, keep):
    embedder = MultimodalEmbedder(pool=None if kind == "items" else make(kind), keep_features=keep)
    item = simple_item([(0, 3)])
    for variant in range(3):
        item.encoded, item.feature = None, feature_for(Modality.IMAGE, variant, 4)
        embeds, _ = embedder.apply(zeros(4), TABLE, one_request([item], 4), IMAGE)
        assert torch.equal(embeds, -feature_for(Modality.IMAGE, variant, 4))
        again, _ = embedder.apply(zeros(4), TABLE, one_request([item], 4), IMAGE)
        assert torch.equal(again, embeds)


@HOMES
def test_rows_that_a_twin_got_since_the_plan_was_made_are_taken(kind):
    embedder = MultimodalEmbedder(pool=None if kind == "items" else make(kind))
    rows = torch.randn(4, HIDDEN)
    first = MultimodalDataItem("image", [(0, 3)], hash=1)
    twin = MultimodalDataItem("image", [(5, 8)], hash=1)
    plan = embedder.plan(one_request([first, twin], 10), 10)
    twin.encoded = rows
    embedder.encode(plan, {}, device="cpu", width=HIDDEN)
    embeds, _ = embedder.assemble(plan, zeros(10), TABLE, {})
    assert torch.equal(embeds[:4], rows)
    precomputed = MultimodalDataItem("image", [(0, 3)], hash=2, encoded=rows)
    plan = embedder.plan(one_request([precomputed], 4), 4)
    assert torch.equal(embedder.assemble(plan, zeros(4), TABLE, {})[0], rows)


@HOMES
def test_threads_may_assemble_one_plan(kind):
    store = None if kind == "items" else make(kind)
    embedder, errors = MultimodalEmbedder(pool=store), []
    expected = -feature_for(Modality.IMAGE, 0, 4)
    for number in range(20):
        plan = embedder.plan(one_request([simple_item([(0, 3)], hash=number)], 4), 4)
        embedder.encode(plan, IMAGE, device="cpu", width=HIDDEN)

        def run(plan=plan):
            try:
                for _ in range(3):
                    assert torch.equal(embedder.assemble(plan, zeros(4), TABLE, IMAGE)[0], expected)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del plan
    assert errors == []
    if store is not None:
        assert pinned(store) == 0


@KINDS
def test_threads_that_begin_one_item_leave_no_hold_behind(kind):
    store = make(kind)
    embedder = MultimodalEmbedder(pool=store)
    for number in range(60):
        item = simple_item([(0, 7)], hash=number)
        threads = [
            threading.Thread(target=embedder.apply, args=(zeros(4), TABLE, chunk(item, 0, 4), IMAGE))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(2):
            embedder.apply(zeros(4), TABLE, chunk(item, 4, 8), IMAGE)
    assert pinned(store) == 0


class Failing:
    """A cache of which some calls fail."""

    def __init__(self, *calls):
        self.calls = set(calls)
        self.store = RowStore(1 << 20)

    def _call(self, name, *arguments):
        if name in self.calls:
            raise ConnectionError(name)
        return getattr(self.store, name)(*arguments)

    def get(self, key):
        return self._call("get", key)

    def put(self, key, rows):
        self._call("put", key, rows)

    def pin(self, key):
        return self._call("pin", key)

    def unpin(self, key):
        self._call("unpin", key)


@pytest.mark.parametrize("calls", [("put",), ("get",), ("pin",), ("unpin",), ("pin", "get", "put", "unpin")])
def test_a_cache_that_fails_is_no_request_s_failure_and_is_logged(calls, caplog):
    cache = Failing(*calls)
    embedder = MultimodalEmbedder(pool=cache)
    item = simple_item([(0, 7)], hash=1)
    with caplog.at_level("WARNING"):
        for first, last in ((0, 4), (4, 8), (0, 8)):
            embeds, _ = embedder.apply(zeros(last - first), TABLE, chunk(item, first, last), IMAGE)
            assert torch.equal(embeds, -feature_for(Modality.IMAGE, 0, 8)[first:last])
            if calls == ("get",):  # what is stored can't be fetched: it is encoded anew
                item.feature = feature_for(Modality.IMAGE, 0, 8)
    assert f"a cache's {calls[0]} failed" in caplog.text


@KINDS
def test_rows_that_find_no_place_serve_later_chunks(kind):
    """A cache may decline; what it declines stays on the item, as without a cache."""
    store = RowStore(8) if kind == "cache" else make("pool", 8)
    embedder, encoder = MultimodalEmbedder(pool=store), Encoder()
    item = simple_item([(0, 7)], hash=1)
    for first, last in ((0, 4), (4, 8)):
        embeds, _ = embedder.apply(zeros(4), TABLE, chunk(item, first, last), {Modality.IMAGE: encoder})
        assert torch.equal(embeds, -feature_for(Modality.IMAGE, 0, 8)[first:last])
    assert len(encoder.calls) == 1


def test_what_is_never_shared_is_not_put_in_a_cache():
    store = RowStore(1 << 20)
    embedder = MultimodalEmbedder(pool=store)
    embedder.apply(zeros(4), TABLE, one_request([simple_item([(0, 3)])], 4), IMAGE)
    assert len(store) == 0


def test_a_kept_feature_that_is_an_unread_handle_goes_with_its_item():
    embedder = MultimodalEmbedder(pool=make("pool"), keep_features=True)
    embedder.apply(zeros(4), TABLE, one_request([simple_item([(0, 3)], hash=1)], 4), IMAGE)
    handle = Handle(feature_for(Modality.IMAGE, 0, 4))
    item = simple_item([(0, 3)], hash=1, feature=handle)
    for _ in range(2):
        embedder.apply(zeros(4), TABLE, one_request([item], 4), IMAGE)
    assert (handle.consumed, handle.released) == (0, 0)
    del item
    gc.collect()
    assert (handle.consumed, handle.released) == (0, 1)


@HOMES
def test_has_rows_serves_a_budget(kind):
    embedder = MultimodalEmbedder(pool=None if kind == "items" else make(kind))
    first = simple_item([(0, 3)], hash=1)
    embedder.apply(zeros(4), TABLE, one_request([first], 4), IMAGE)
    again, new = (first if kind == "items" else simple_item([(0, 3)], hash=1)), simple_item([(0, 3)], hash=2)
    assert (embedder.has_rows(again), embedder.has_rows(new)) == (True, False)
    ctx = MultimodalForwardContext([MultimodalInputs([again]), MultimodalInputs([new])], [0, 0], [4, 4])
    now = fit_to_budget(ctx, 8, encode_tokens=0, cached=embedder.has_rows)
    assert now.extend_seq_lens == (4, 0)


def test_a_lease_gives_up_single_keys():
    pool = make("pool", 16)
    with pool.lease() as lease:
        lease.reserve({"a": 4, "b": 4})
        lease.fill(["a"], torch.ones(4, HIDDEN))
        assert lease.columns("a") == (HIDDEN,)
        lease.give_up(["b", "c"])
        assert pool.stats().rows_used == 4
        lease.reserve({"b": 8})
        lease.give_up(["a"])
        assert pool.stats().rows_pinned == 8
        assert not lease.pin("b2", 4, count=False)
        assert lease.pin("a", 4)
        assert (pool.stats().hits, pool.stats().misses) == (1, 0)
    assert pool.stats().rows_pinned == 0


def test_classes_and_wrong_widths_are_refused():
    with pytest.raises(OptionError, match="pool must be an EncoderPool"):
        MultimodalEmbedder(pool=RowStore)
    embedder = MultimodalEmbedder(pool=make("pool"))
    for width in (None, 4.0, 0):
        with pytest.raises(OptionError, match="width must be"):
            embedder.prepare(one_request([simple_item([(0, 3)])], 4), 4, IMAGE, width=width)
    with pytest.raises(MultimodalError, match="prefetch needs"):
        embedder.prefetch(None, device="cpu")
    assert Rows(torch.zeros(1, 1)).nbytes == 4
