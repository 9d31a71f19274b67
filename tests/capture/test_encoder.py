"""Invariant: an encoder gives each item what the adapter gives it alone, in order, whatever was packed with what.

What its buckets hold is replayed, and nothing is captured by a call; an error leaves it as it was.
"""

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from clips import GRID, Clip, ClipAdapter, expected, make_clip
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import (
    EncoderPool,
    EncoderSpec,
    Modality,
    MultimodalDataItem,
    MultimodalEmbedder,
    MultimodalForwardContext,
    MultimodalInputs,
)
from mmgraph.capture import (
    AdapterError,
    Bucket,
    BucketError,
    BucketGrid,
    CallError,
    CapturedEncoder,
    CaptureError,
    MissError,
    SpecError,
    StaleWeights,
    rows,
)

EXAMPLES = (make_clip([6, 4], 0), make_clip([6], 1, "video"))


def tokens_of(bucket: Bucket) -> float:
    return float(bucket["tokens"])


def make_encoder(adapter: ClipAdapter, **options: Any) -> CapturedEncoder:
    return CapturedEncoder(adapter, buckets=GRID, **{"cost": tokens_of, **options})


@pytest.fixture(scope="module")
def encoder() -> CapturedEncoder:
    return make_encoder(ClipAdapter()).precompile(EXAMPLES, progress=False)


@pytest.fixture(scope="module")
def adapter(encoder: CapturedEncoder) -> ClipAdapter:
    found: ClipAdapter = encoder._towers[None].adapter
    return found


def assert_same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


clips = st.builds(
    make_clip,
    st.lists(st.integers(0, 12), max_size=5),
    st.integers(0, 2**31),
    st.sampled_from(["image", "image", "video"]),
)
too_large = st.builds(make_clip, st.just([40, 30]), st.integers(0, 2**31))


@settings(max_examples=300)
@given(items=st.lists(st.one_of(*[clips] * 7, too_large), max_size=7))
def test_results_equal_the_adapters_item_by_item_and_nothing_is_captured(
    encoder: CapturedEncoder, adapter: ClipAdapter, items: list[Clip]
) -> None:
    before = encoder.report().towers[None]
    adapter.prepared.clear()
    packs = encoder.explain(items)
    got = encoder(items)
    run = list(adapter.prepared)
    assert_same(got, expected(adapter, items))
    after = encoder.report().towers[None]
    assert run == [pack.bucket for pack in packs]
    assert sorted(i for pack in packs for i in pack.items) == list(range(len(items)))
    for pack in packs:
        assert {items[i].path for i in pack.items} == {pack.path}
        assert (pack.bucket is None) == (pack.sizes["tokens"] > 64)
        assert pack.bucket is not None or len(pack.items) == 1
    assert after.hits - before.hits == sum(bucket is not None for bucket in run)
    assert [b.capture_seconds for b in after.buckets] == [b.capture_seconds for b in before.buckets]
    hits = {(b.variant, Bucket(b.bucket)): b.hits for b in after.buckets}
    for pack in packs:
        assert pack.bucket is None or hits[pack.path, pack.bucket] > 0


def test_items_share_buckets_in_the_order_given(encoder: CapturedEncoder) -> None:
    items = [make_clip([n], n) for n in (20, 4, 12, 4, 24)]
    packs = encoder.explain(items)
    assert [(pack.items, pack.bucket and pack.bucket["tokens"]) for pack in packs] == [((0, 1, 2, 3, 4), 64)]
    assert packs[0].padding["tokens"] == 0
    assert packs[0].padding["seqlen"] == pytest.approx(1 - 24 / 64)
    many = [make_clip([20], n) for n in range(4)]
    assert sorted(len(pack.items) for pack in encoder.explain(many)) == [1, 3]


def test_no_items_are_no_results_and_empty_items_have_empty_ones(
    encoder: CapturedEncoder, adapter: ClipAdapter
) -> None:
    adapter.prepared.clear()
    assert encoder([]) == []
    out = torch.empty(0, 6, dtype=torch.float64)
    assert encoder([], out) is out
    assert adapter.prepared == []
    nothing = make_clip([], 0)
    got = encoder([nothing, make_clip([4], 1), nothing])
    assert [tuple(one.shape) for one in got] == [(0, 6), (2, 6), (0, 6)]


def test_derived_sizes_bound_a_pack(encoder: CapturedEncoder) -> None:
    # Frames of two tokens have a window each, more than a quarter of the tokens.
    items = [make_clip([2] * 8, n) for n in range(2)]
    sizes = [pack.sizes for pack in encoder.explain(items)]
    assert sizes == [{"tokens": 32, "frames": 16, "seqlen": 2, "windows": 16}]
    crowded = [make_clip([2] * 8, 0), make_clip([2] * 9, 1)]
    assert [pack.items for pack in encoder.explain(crowded)] == [(0,), (1,)]


def test_rows_are_written_into_out(encoder: CapturedEncoder, adapter: ClipAdapter) -> None:
    items = [make_clip([6], 1), make_clip([40, 30], 2), make_clip([2, 2], 3, "video")]
    wanted = torch.cat(expected(adapter, items))
    wide = torch.full((len(wanted), 8), -1.0, dtype=torch.float32)
    out = wide[:, 1:7]
    assert encoder(items, out=out) is out
    assert torch.equal(out.double(), wanted)
    assert bool((wide[:, [0, 7]] == -1).all())
    for bad, words in [
        (
            torch.zeros(len(wanted) + 1, 6),
            "out has 41 rows, but the results of the items have 40",
        ),
        (torch.zeros(len(wanted), 5), r"out is \[rows, 5\]"),
        (torch.zeros(6), r"\[rows, width\], got \[6\]"),
        ([1], r"\[rows, width\], got list"),
        (torch.zeros(len(wanted), 6, requires_grad=True), "gradient"),
        (torch.zeros(len(wanted), 6, device="meta"), "on meta"),
    ]:
        with pytest.raises(CallError, match=words):
            encoder(items, out=bad)
        assert not isinstance(bad, torch.Tensor) or bad.is_meta or not bool(bad.any())


class Plain:
    """Rows times a weight: no path, no optional methods."""

    inputs = {"x": rows("tokens")}  # noqa: RUF012
    outputs = rows("tokens")

    def __init__(self, factor: float = 2.0) -> None:
        self.weight = torch.tensor(factor)
        self.change: Callable[[str, Any], Any] = lambda name, value: value

    def sizes(self, item: torch.Tensor) -> Mapping[str, int]:
        sizes: Mapping[str, int] = self.change("sizes", {"tokens": len(item)})
        return sizes

    def prepare(self, items: Sequence[torch.Tensor], bucket: Bucket | None) -> Mapping[str, Any]:
        inputs: Mapping[str, Any] = self.change("prepare", {"x": torch.cat(list(items))})
        return inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def split(self, outputs: Any, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = self.change("split", outputs.split([len(item) for item in items]))
        return parts


def plain_encoder(adapter: Any, sizes: Sequence[int] = (4, 16), **options: Any) -> CapturedEncoder:
    encoder = CapturedEncoder(adapter, buckets=BucketGrid(tokens=sizes), **{"cost": tokens_of, **options})
    return encoder.precompile([ones(3)], progress=False)


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


def test_an_adapter_that_answers_wrongly_is_an_error_that_names_what_and_the_next_call_works() -> None:
    adapter = Plain()
    encoder = plain_encoder(adapter)
    for name, answer, words in [
        ("sizes", {}, r"sizes of item 0 must name \['tokens'\].*missing \['tokens'\]"),
        ("sizes", {"tokens": 2, "more": 1}, r"unknown \['more'\]"),
        ("sizes", {"tokens": -1}, "'tokens' of item 0 must be zero or more"),
        ("sizes", {"tokens": 2**60}, "below 2"),
        ("sizes", {"tokens": 2.0}, "must be a Python int, got 2.0"),
        ("sizes", {"tokens": True}, "must be a Python int, got True"),
        ("sizes", {"tokens": torch.tensor(2)}, "got a tensor on cpu.*waits for the device"),
        ("sizes", [2], "must be a mapping.*got list"),
        ("prepare", [ones(2)], "prepare must give a mapping.*items 0, 1, got list"),
        ("split", [ones(2)], "one result for each of the 2 items of items 0, 1, got 1"),
        ("split", torch.ones(2, 2), "got a Tensor"),
    ]:
        adapter.change = lambda asked, value, name=name, answer=answer: answer if asked == name else value
        with pytest.raises(AdapterError, match=words):
            encoder([ones(2), ones(2)])
        adapter.change = lambda name, value: value
        assert_same(encoder([ones(2), ones(2)]), [ones(2) * 2] * 2)
    adapter.change = lambda name, value: {"tokens": 1} if name == "sizes" else value
    with pytest.raises(
        AdapterError, match="prepare made tokens=3 of item 0, and the sum of what sizes says is 1"
    ):
        encoder.precompile([ones(3)], progress=False)
    report = encoder.report()
    assert (report.calls, report.items) == (11, 22)  # the good ones


def test_results_are_checked_against_the_rows_that_the_adapter_names() -> None:
    class Counted(Plain):
        lost = 0

        def rows(self, item: torch.Tensor) -> int:
            return len(item) + self.lost

    adapter = Counted()
    encoder = plain_encoder(adapter)
    assert_same(encoder([ones(2), ones(3)]), [ones(2) * 2, ones(3) * 2])
    adapter.lost = 1
    with pytest.raises(AdapterError, match=r"result of shape \[2\] .* rows\(item\) is 3"):
        encoder([ones(2), ones(3)])


def test_whatever_the_adapter_raises_leaves_the_encoder_usable() -> None:
    adapter = Plain()
    encoder = plain_encoder(adapter)

    def fail(name: str, value: Any) -> Any:
        raise ValueError(f"no {name}")

    adapter.change = fail
    with pytest.raises(ValueError, match="no sizes"):
        encoder([ones(2)])
    adapter.change = lambda name, value: value
    with pytest.raises(CallError, match=r"must be torch\.float32"):
        encoder([ones(2).double()])
    assert_same(encoder([ones(2)]), [ones(2) * 2])


def test_too_large_items_go_by_the_adapters_own_eager_run() -> None:
    class Eager(Plain):
        seen: list[int] = []  # noqa: RUF012

        def eager(self, items: Sequence[torch.Tensor]) -> torch.Tensor:
            self.seen += map(len, items)
            assert not torch.is_grad_enabled()
            return torch.cat(list(items)) * self.weight

    encoder = plain_encoder(Eager())
    assert_same(encoder([ones(n) for n in (20, 3, 30)]), [ones(n) * 2 for n in (20, 3, 30)])
    assert Eager.seen == [20, 30]
    report = encoder.report()
    assert (report.calls, report.items, report.packs) == (1, 3, 3)
    assert report.eager == {"beyond the grid": 2}
    assert report.towers[None].misses == {}
    assert report.to_dict()["towers"][""]["hits"] == 1
    assert '"packs": 3' in report.to_json()
    assert "3 items in 3 packs, items run eagerly: 2 beyond the grid" in str(report)


def test_before_precompile_and_after_close_packs_run_eagerly() -> None:
    adapter = Plain()
    encoder = CapturedEncoder(adapter, buckets=BucketGrid(tokens=(4, 16)))
    items = [ones(n) for n in (9, 12, 5, 20)]
    for reason in ("not precompiled", "suspended", "not precompiled"):
        packs = encoder.explain(items)
        assert [pack.items for pack in packs] == [(0, 2), (1,), (3,)]
        assert {pack.kind for pack in packs} == {reason}
        assert_same(encoder(items), [item * 2 for item in items])
        if reason == "suspended":
            encoder.close()
        else:
            encoder.precompile(items[:1], progress=False)
            assert encoder.explain(items)[0].bucket == Bucket(tokens=16)
            encoder.managers[None].suspend()
    report = encoder.report()
    assert report.eager == {"not precompiled": 8, "suspended": 4}
    assert report.towers[None].hits == 0


def test_items_are_packed_into_the_buckets_that_are_captured() -> None:
    grid = BucketGrid(tokens=(4, 16, 64))
    encoder = CapturedEncoder(Plain(), buckets=grid).precompile(
        [ones(3)], buckets=[grid.buckets[1]], progress=False
    )
    packs = encoder.explain([ones(n) for n in (10, 15, 2, 30)])
    assert [(pack.items, pack.bucket) for pack in packs] == [
        ((0, 2), grid.buckets[1]),
        ((1,), grid.buckets[1]),
        ((3,), None),
    ]
    assert packs[2].reason == "not captured: Bucket(tokens=64)"
    encoder.managers[None].evict(grid.buckets[1])
    assert [pack.bucket for pack in encoder.explain([ones(2)])] == [None]


def test_misses_are_errors_before_anything_is_run_or_captures() -> None:
    adapter = Plain()
    asked: list[str] = []
    encoder = plain_encoder(adapter, on_miss="error")
    adapter.change = lambda name, value: (asked.append(name), value)[1]
    with pytest.raises(MissError, match="no graph serves item 1: beyond the grid: tokens=17") as caught:
        encoder([ones(2), ones(17)])
    assert caught.value.reason.startswith("beyond the grid")
    assert set(asked) == {"sizes"}
    assert_same(encoder([ones(2)]), [ones(2) * 2])

    lazy = CapturedEncoder(Plain(), buckets=BucketGrid(tokens=(4, 16, 64)), cost=tokens_of, on_miss="capture")
    assert [(p.items, p.bucket) for p in lazy.explain([ones(4), ones(14)])] == [
        ((0,), Bucket(tokens=4)),
        ((1,), Bucket(tokens=16)),
    ]
    assert_same(lazy([ones(14)]), [ones(14) * 2])
    # The captured bucket serves what it holds, so that smaller ones don't count any more.
    assert [(p.items, p.bucket) for p in lazy.explain([ones(4), ones(12), ones(61)])] == [
        ((0, 1), Bucket(tokens=16)),
        ((2,), Bucket(tokens=64)),
    ]
    assert_same(lazy([ones(4), ones(12), ones(61)]), [ones(n) * 2 for n in (4, 12, 61)])
    assert lazy.report().towers[None].hits == 3
    assert lazy.report().eager == {}
    largest = CapturedEncoder(
        Plain(), buckets=BucketGrid(tokens=(4, 16, 64)), cost=tokens_of, on_miss="capture"
    )
    largest([ones(60)])
    assert [(p.items, p.bucket) for p in largest.explain([ones(14)] * 3)] == [((0, 1, 2), Bucket(tokens=64))]


def test_the_managers_policy_has_the_last_word() -> None:
    encoder = plain_encoder(Plain(), policy="exact")
    packs = encoder.explain([ones(4), ones(14)])
    assert [(pack.items, pack.bucket) for pack in packs] == [((0,), Bucket(tokens=4)), ((1,), None)]
    assert packs[1].kind == "not exact"
    assert_same(encoder([ones(4), ones(14)]), [ones(4) * 2, ones(14) * 2])
    report = encoder.report()
    assert report.eager == report.towers[None].misses == {"not exact": 1}


def test_replaced_weights_are_the_managers_business_and_are_explained() -> None:
    adapter = Plain()
    encoder = plain_encoder(adapter, check="always")
    adapter.weight = torch.tensor(5.0)
    assert encoder.explain([ones(2)])[0].kind == "stale weights"
    with pytest.raises(StaleWeights):
        encoder([ones(2)])
    encoder.precompile([ones(2)], progress=False)
    assert_same(encoder([ones(2)]), [ones(2) * 5])


def test_measured_costs_decide_where_there_are_any() -> None:
    encoder = plain_encoder(Plain(), cost="measured")
    tower = encoder._towers[None]
    packer, _, ready = tower._packer(None)
    assert ready
    measured = [row.replay_seconds for row in encoder.report().towers[None].buckets]
    assert [pack.cost for pack in packer.pack([(3,)]) + packer.pack([(9,)])] == measured
    empty = CapturedEncoder(Plain(), buckets=BucketGrid(tokens=(4, 16)))
    assert [pack.cost for pack in empty._towers[None]._packer(None)[0].pack([(3,)])] == [4.0]


def by_size(item: torch.Tensor) -> str:
    return "wide" if item.shape[-1] == 2 else "narrow"


def test_several_adapters_have_graphs_of_their_own() -> None:
    wide, narrow = Plain(3.0), Plain(2.0)
    grids = {"wide": BucketGrid(tokens=(8,)), "narrow": BucketGrid(tokens=(4, 16))}
    encoder = CapturedEncoder({"wide": wide, "narrow": narrow}, buckets=grids, path=by_size, cost=tokens_of)
    items = [torch.ones(2, 2), torch.ones(2, 1), torch.ones(5, 2), torch.ones(9, 2), torch.ones(1, 1)]
    encoder.precompile(items, progress=False, buckets={"narrow": [Bucket(tokens=16)]})
    packs = [(pack.items, pack.tower, pack.bucket) for pack in encoder.explain(items)]
    assert packs == [
        ((0, 2), "wide", Bucket(tokens=8)),
        ((3,), "wide", None),
        ((1, 4), "narrow", Bucket(tokens=16)),
    ]
    assert_same(encoder(items), [item * (3 if by_size(item) == "wide" else 2) for item in items])
    assert encoder.managers.keys() == encoder.report().towers.keys() == {"wide", "narrow"}
    assert "wide\n" in str(encoder.report())
    other = CapturedEncoder({"narrow": narrow}, buckets=grids["narrow"], path=by_size)
    with pytest.raises(CallError, match="item 1 is of path 'wide', for which there is no adapter"):
        other([torch.ones(2, 1), torch.ones(2, 2)])
    with pytest.raises(SpecError, match="by the names of adapters"):
        encoder.precompile(items, buckets={"other": []})


def test_wrong_arguments_are_errors_at_once() -> None:
    grid = BucketGrid(tokens=(4,))
    makes: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: CapturedEncoder(object(), buckets=grid), SpecError, r"inputs, outputs, sizes\(\.\.\.\)"),
        (lambda: CapturedEncoder(Plain, buckets=grid), SpecError, "an instance, got the class"),
        (lambda: CapturedEncoder({}, buckets=grid, path=by_size), SpecError, "a mapping of names to adapters"),
        (lambda: CapturedEncoder({"a": Plain()}, buckets=grid), SpecError, "path= must be a function"),
        (lambda: CapturedEncoder(Plain(), buckets=grid, path=by_size), SpecError, "there is one"),
        (
            lambda: CapturedEncoder({"a": Plain()}, buckets={"b": grid}, path=by_size),
            SpecError,
            r"one for each of \['a'\]",
        ),
        (lambda: CapturedEncoder(Plain(), buckets=(4, 8)), SpecError, "must be a BucketGrid"),
        (lambda: CapturedEncoder(Plain(), buckets=grid, cost="least"), SpecError, "cost must be"),
        (lambda: CapturedEncoder(Plain(), buckets=grid, cost=lambda b: -1), BucketError, "zero or more"),
        (lambda: CapturedEncoder(Plain(), buckets=grid, overhead=-1), BucketError, "overhead must be"),
        (lambda: CapturedEncoder(Plain(), buckets=grid, on_miss="never"), SpecError, "on_miss must be one of"),
        (lambda: CapturedEncoder(Plain(), buckets=BucketGrid(n=(4,))), SpecError, "names the size 'tokens'"),
        (
            lambda: CapturedEncoder(Plain(), buckets=grid).precompile([]),
            CallError,
            "at least one item of each path",
        ),
        (lambda: pickle.dumps(CapturedEncoder(Plain(), buckets=grid)), CaptureError, "can't be copied"),
    ]
    for make, kind, words in makes:
        with pytest.raises(kind, match=words):
            make()


def test_a_path_must_be_hashable(encoder: CapturedEncoder) -> None:
    bad = make_clip([2], 0, path=["image"])
    with pytest.raises(CallError, match="must be hashable"):
        encoder([bad])


def test_any_thread_may_call(encoder: CapturedEncoder, adapter: ClipAdapter) -> None:
    lists = [[make_clip([2 * n, 4], n + i, ["image", "video"][n % 2]) for n in range(6)] for i in range(4)]
    wanted = [expected(adapter, items) for items in lists]
    calls = encoder.report().calls
    wrong: list[int] = []

    def serve(index: int) -> None:
        for _ in range(5):
            got = encoder(lists[index])
            if not all(map(torch.equal, got, wanted[index])):
                wrong.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert encoder.report().calls - calls == 20


def test_a_compiled_caller_runs_the_call_as_it_is(encoder: CapturedEncoder, adapter: ClipAdapter) -> None:
    items = [make_clip([4], 1), make_clip([6], 2)]

    @torch.compile(backend="eager")
    def caller() -> torch.Tensor:
        return torch.cat(encoder(items)) + 1

    assert torch.equal(caller(), torch.cat(expected(adapter, items)) + 1)


class ItemAdapter(Plain):
    """For the embedder's items."""

    def sizes(self, item: Any) -> Mapping[str, int]:
        return {"tokens": item.num_tokens}

    def prepare(self, items: Sequence[Any], bucket: Bucket | None) -> Mapping[str, Any]:
        return {"x": torch.cat([item.feature for item in items])}

    def split(self, outputs: Any, items: Sequence[Any]) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = outputs.split([item.num_tokens for item in items])
        return parts


@pytest.mark.parametrize("pooled", [False, True])
def test_it_stands_as_the_embedders_encoder(pooled: bool) -> None:
    def item(tokens: int, start: int) -> MultimodalDataItem:
        return MultimodalDataItem(
            "image", offsets=[(start, start + tokens - 1)], feature=torch.randn(tokens, 4), hash=start
        )

    encoder = CapturedEncoder(ItemAdapter(), buckets=BucketGrid(tokens=(4, 16)))
    encoder.precompile([item(3, 0)], progress=False)
    items = [item(3, 1), item(20, 5), item(6, 30)]
    rows_of = {one: one.feature * 2 for one in items}
    pool = EncoderPool(rows=64, width=4, dtype=torch.float32, device="cpu") if pooled else None
    embedder = MultimodalEmbedder(pool=pool)
    ctx = MultimodalForwardContext([MultimodalInputs(items)], [0], [40])
    with torch.inference_mode():
        embeds, _ = embedder.apply(
            torch.zeros(40, dtype=torch.int64),
            torch.nn.Embedding(8, 4),
            ctx,
            {Modality.IMAGE: EncoderSpec(encoder, takes_out=pooled)},
        )
    for one in items:
        ((start, end),) = one.offsets
        assert torch.equal(embeds[start : end + 1], rows_of[one])
    assert encoder.report().items == 3


def test_an_out_that_would_destroy_results_is_refused_before_anything_runs(
    encoder: CapturedEncoder, adapter: ClipAdapter
) -> None:
    items = [make_clip([4], 0)]
    rows = expected(adapter, items)[0]
    calls = encoder.report().calls
    with torch.inference_mode():
        inference = torch.empty_like(rows)
    for out, words in (
        (torch.zeros(rows.shape, dtype=torch.int64), "floating-point, as rows are, got torch.int64"),
        (torch.zeros(rows.shape, dtype=torch.bool), "got torch.bool"),
        (torch.zeros(1, rows.shape[1]).expand(max(2, len(rows)), rows.shape[1]), "share memory"),
        (inference, "inference tensor"),
    ):
        with pytest.raises(CallError, match=words):
            encoder(items, out=out)
    assert encoder.report().calls == calls
    with pytest.raises(CallError, match="items must be a sequence"):
        encoder(None)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="items must be a sequence"):
        encoder.precompile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eager", "path", "rows"])
def test_what_an_adapter_may_have_must_be_a_method(name: str, adapter: ClipAdapter) -> None:
    class Odd(ClipAdapter):
        pass

    setattr(Odd, name, 3)
    with pytest.raises(SpecError, match=f"{name} of an adapter must be methods"):
        CapturedEncoder(Odd(), buckets=GRID)
