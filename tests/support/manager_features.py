"""What a manager promises beside its plain call, as checks that run on any device: leases, variants, bounds, misses."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmgraph.capture import (
    Bucket,
    BucketError,
    BucketGrid,
    CallError,
    CaptureError,
    CaptureFailedError,
    CaptureManager,
    Choice,
    MemoryBoundError,
    MissError,
    SpecError,
    StaleLeaseError,
    StaleWeights,
    VerificationError,
    bucket_size,
    offsets,
    rows,
    static,
)

Device = torch.device
CHECKS: dict[str, Callable[[Device], None]] = {}


def check(function: Callable[[Device], None]) -> Callable[[Device], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def doubled(device: Device, sizes: tuple[int, ...] = (4, 8, 16), **options: Any) -> CaptureManager:
    manager = CaptureManager(
        lambda x: {"y": x * 2, "z": [x + 1]},
        inputs={"x": rows("n")},
        outputs={"y": rows("n"), "z": [rows("n")]},
        buckets=BucketGrid(n=sizes),
        **options,
    )
    return manager.precompile({"x": torch.zeros(3, 2, device=device)}, progress=False)


def ramp(n: int, device: Device, start: float = 0.0) -> torch.Tensor:
    return torch.arange(2 * n, device=device, dtype=torch.float32).view(n, 2) + start


@check
def a_lease_is_the_result_until_the_next_one_has_its_memory(device: Device) -> None:
    manager = doubled(device, debug=True)
    x = ramp(5, device)
    first = manager.lease(x=x)
    assert torch.equal(first.get()["y"], x * 2)
    copied = manager(x=x + 1)  # a copy takes nothing from a lease
    assert torch.equal(first.get()["z"][0], x + 1)
    held = first.get()["y"]
    second = manager.lease(x=ramp(2, device))
    assert first.stale
    with pytest.raises(StaleLeaseError, match="before the next lease"):
        first.get()
    assert held[4:].isnan().all()  # debug: what nobody may read any more is poisoned
    assert torch.equal(second.get()["y"], ramp(2, device) * 2)
    with manager.lease(x=x) as value:
        assert torch.equal(value["y"], x * 2)
    assert second.stale
    assert torch.equal(copied["y"], (x + 1) * 2)
    manager.close()
    with pytest.raises(StaleLeaseError):
        manager.lease(x=x).release() or second.get()
    beyond = manager.lease(x=x)  # a miss: the function's own tensors
    manager.lease(x=x)
    assert torch.equal(beyond.get()["y"], x * 2)


@check
def results_go_into_the_callers_tensors_and_autograd_is_told(device: Device) -> None:
    manager = doubled(device)
    x = ramp(5, device)
    wide = torch.zeros(5, 4, device=device)
    out = {"y": torch.zeros(5, 2, device=device), "z": [wide[:, ::2]]}
    leaf = torch.ones(5, 2, device=device, requires_grad=True)
    product = (leaf * out["y"]).sum()
    got = manager.into(out, x=x)
    assert got["y"] is out["y"]
    assert torch.equal(out["y"], x * 2)
    assert torch.equal(wide[:, ::2], x + 1)
    assert (wide[:, 1::2] == 0).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    shared = torch.zeros(5, 2, device=device)
    before = out["y"].clone()
    for bad, words in [
        ({"y": shared, "z": [shared]}, "same memory"),
        ({"y": shared, "z": [torch.zeros(2, device=device).expand(5, 2)]}, "expanded"),
        ({"y": torch.zeros(4, 2, device=device), "z": [wide[:, ::2]]}, "must be torch.float32"),
        ({"y": torch.zeros(5, 2, device=device).double(), "z": [wide[:, ::2]]}, "must be torch.float32"),
        ({"y": torch.zeros(5, 2, device=device, requires_grad=True), "z": [wide[:, ::2]]}, "gradient"),
        ({"y": None, "z": [wide[:, ::2]]}, "must be a tensor"),
        ([1], "structure"),
    ]:
        with pytest.raises(CallError, match=words):
            manager.into(bad, x=x)
    assert torch.equal(out["y"], before)
    half = {"y": torch.zeros(20, 2, device=device), "z": [torch.zeros(3, 2, device=device)]}
    with pytest.raises(CallError, match=r"must be torch.float32 \[20, 2\]"):
        manager.into(half, x=ramp(20, device))  # on a miss, too, all are looked at before one is written
    assert (half["y"] == 0).all()
    big = {"y": torch.zeros(20, 2, device=device), "z": [torch.zeros(20, 2, device=device)]}
    assert manager.into(big, x=ramp(20, device))["y"] is big["y"]  # a miss
    assert torch.equal(big["y"], ramp(20, device) * 2)


@check
def a_caller_may_write_the_static_inputs_himself(device: Device) -> None:
    manager = CaptureManager(
        lambda x, cu, longest, k: (x.cumsum(0) * k, cu * 1),
        inputs={
            "x": rows("n", fill=7.0),
            "cu": offsets("b", of="n"),
            "longest": bucket_size("seqlen"),
            "k": static(),
        },
        outputs=(rows("n"), offsets("b", of="n")),
        buckets=BucketGrid(n=(4, 8), b=(2, 4), seqlen=(8,)),
    )
    cu = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    k = torch.full((2,), 3.0, device=device)
    manager.precompile({"x": ramp(3, device), "cu": cu, "longest": 2, "k": k}, progress=False)
    manager(x=ramp(8, device), cu=cu, longest=2, k=k)  # leaves other values behind
    with manager.stage(n=5, b=3, seqlen=2) as staged:
        assert staged.inputs["x"].shape == (5, 2)
        assert staged.inputs["longest"] == 2
        staged.inputs["x"].copy_(ramp(5, device))
        staged.inputs["cu"].copy_(torch.tensor([0, 1, 2, 5], device=device))
        staged.inputs["k"].copy_(k)
        total, boundaries = staged.replay()
        assert torch.equal(staged.lease().get()[0], total)
    assert torch.equal(total, ramp(5, device).cumsum(0) * 3)
    assert boundaries.tolist() == [0, 1, 2, 5]
    with pytest.raises(MissError, match="beyond the grid"), manager.stage(n=9, b=1, seqlen=2):
        pass
    with pytest.raises(ValueError, match="a size for each of"), manager.stage(n=3):
        pass
    with pytest.raises(CallError, match="zero or more"), manager.stage(n=-1, b=1, seqlen=1):
        pass
    assert torch.equal(manager(x=ramp(2, device), cu=cu, longest=2, k=k)[0], ramp(2, device).cumsum(0) * 3)


class Switched(torch.nn.Module):
    """A module with a mode that picks one of two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        self.two = torch.nn.Parameter(torch.tensor([2.0, 2.0]))
        self.mode = "one"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.one if self.mode == "one" else self.two)


@check
def a_stage_is_undisturbed_within_its_block_and_over_after_it(device: Device) -> None:
    manager, lazy = (
        doubled(device),
        CaptureManager(
            lambda x: x + 5,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
            on_miss="capture",
        ),
    )
    with manager.stage(n=3) as staged:
        staged.inputs["x"].fill_(7.0)
        for disturb in (
            lambda: manager(x=ramp(3, device)),
            lambda: manager.evict(Bucket(n=4)),
            manager.close,
            lambda: manager.precompile({"x": ramp(3, device)}, progress=False),
            manager.suspend,
            lambda: manager.stage(n=2).__enter__(),
        ):
            with pytest.raises(CaptureError, match=r"a stage|within a stage"):
                disturb()
        # Another manager may be called, but captures nothing: captures wait for each other, and they for this.
        assert torch.equal(lazy(x=ramp(3, device)), ramp(3, device) + 5)
        assert lazy.report().buckets == ()
        assert (staged.replay()["y"] == 14).all()
    with pytest.raises(CaptureError, match="over"):
        staged.replay()
    assert torch.equal(lazy(x=ramp(3, device)), ramp(3, device) + 5)
    assert len(lazy.report().buckets) == 1
    assert torch.equal(manager(x=ramp(3, device))["y"], ramp(3, device) * 2)


@check
def what_the_function_declares_to_write_is_cloned_on_a_miss(device: Device) -> None:
    manager = CaptureManager(
        lambda x: x.relu_() + 0, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    manager.precompile({"x": torch.ones(3, 2, device=device)}, progress=False)  # relu_ changes none of these
    beyond = -torch.ones(9, 2, device=device)
    assert (manager(x=beyond) == 0).all()
    assert (beyond == -1).all()


@check
def what_is_watched_may_be_given_in_any_form(device: Device) -> None:
    table = torch.ones(2, device=device)
    module = torch.nn.Linear(2, 2, device=device)
    for watch in (module, table, (m for m in [module, table]), {"table": table}, [module]):
        manager = CaptureManager(
            lambda x: x * table,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
            watch=watch,
        )
        counts = []
        for _ in range(2):
            manager.precompile({"x": ramp(3, device)}, progress=False)
            counts.append(manager.report().watched)
        assert counts[0] == counts[1] > 0
    with pytest.raises(SpecError, match="watch"):
        doubled(device, watch=3)


@check
def a_resume_that_fails_can_be_tried_again(device: Device) -> None:
    fails = [False]

    def function(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("not now")
        return x * 2

    manager = CaptureManager(function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
    manager.precompile({"x": ramp(3, device)}, progress=False)
    manager.suspend()
    fails[0] = True
    with pytest.raises(CaptureFailedError, match="not now"):
        manager.resume()
    fails[0] = False
    assert manager.explain_call(x=ramp(3, device)).reason.startswith("suspended")
    manager.resume()
    assert torch.equal(manager(x=ramp(7, device)), ramp(7, device) * 2)
    assert len(manager.report().buckets) == 2


@check
def a_capture_that_can_not_fit_evicts_nothing(device: Device) -> None:
    small = CaptureManager(
        lambda x: x * 2, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8, 1 << 22))
    )
    small.precompile({"x": ramp(3, device)}, progress=False, buckets=[Bucket(n=4), Bucket(n=8)])
    report = small.report()
    taken = report.static_bytes + report.pool_bytes + report.executable_bytes + report.workspace_bytes
    manager = CaptureManager(
        lambda x: x * 2,
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4, 8, 1 << 22)),
        max_bytes=taken + (8 << 20),
        on_miss="capture",
    )
    manager.precompile({"x": ramp(3, device)}, progress=False, buckets=[Bucket(n=4), Bucket(n=8)])
    large = torch.ones(9, 2, device=device)
    assert torch.equal(manager(x=large), large * 2)  # 1 << 22 rows alone are more than the bound
    assert [b.bucket["n"] for b in manager.report().buckets] == [4, 8]
    assert manager.explain_call(x=large).reason.startswith("capture failed")


@check
def managers_inside_captures_capture_nothing_and_say_nothing(device: Device) -> None:
    for on_miss in ("capture", "error"):
        inner = CaptureManager(
            lambda x: x * 2,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
            on_miss=on_miss,
        )
        outer = CaptureManager(
            lambda x, inner=inner: inner(x=x) + 1,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
        )
        outer.precompile({"x": ramp(3, device)}, progress=False)
        assert torch.equal(outer(x=ramp(3, device)), ramp(3, device) * 2 + 1)
        assert inner.report().buckets == ()


@check
def a_function_can_not_take_its_own_graphs_away_while_they_are_captured(device: Device) -> None:
    managers: list[CaptureManager] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if managers:
            managers[0].evict(Bucket(n=8))
        return x * 2

    manager = CaptureManager(function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
    managers.append(manager)
    with pytest.raises(CaptureFailedError, match="within a capture"):
        manager.precompile({"x": ramp(3, device)}, progress=False)
    managers.clear()
    manager.precompile({"x": ramp(3, device)}, progress=False)
    assert torch.equal(manager(x=ramp(3, device)), ramp(3, device) * 2)


@check
def a_manager_can_not_be_copied_and_bad_names_are_told(device: Device) -> None:
    manager = doubled(device)
    for act in (lambda: copy.deepcopy(manager), lambda: copy.copy(manager), lambda: pickle.dumps(manager)):
        with pytest.raises(CaptureError, match="can't be copied or pickled"):
            act()
    for act in (
        lambda: manager(x=ramp(3, device), variant=[1]),
        lambda: manager.precompile({"x": ramp(3, device)}, progress=False, variant={}),
        lambda: manager.evict(Bucket(n=4), variant=[1]),
        lambda: manager.predict_bytes(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(CallError, match=r"hashable|must map"):
            act()
    assert manager.evict({"n": 4})  # type: ignore[arg-type]
    named = CaptureManager(
        lambda self, out: self + out,
        inputs={"self": rows("n"), "out": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    named.precompile({"self": ramp(3, device), "out": ramp(3, device)}, progress=False)
    target = torch.zeros(2, 2, device=device)
    named.into(target, self=ramp(2, device), out=ramp(2, device))
    assert torch.equal(target, ramp(2, device) * 2)


@check
def another_default_device_changes_nothing(device: Device) -> None:
    with torch.device("meta"):
        manager = doubled(device, prove_padding=True)
        x = ramp(3, device)
        assert torch.equal(manager(x=x)["y"], x * 2)


@check
def variants_have_graphs_of_their_own_in_shared_memory(device: Device) -> None:
    module = Switched().to(device).requires_grad_(False)
    manager = CaptureManager(module, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
    example, x = {"x": ramp(3, device)}, ramp(5, device)
    for mode in ("one", "two"):
        module.mode = mode
        manager.precompile(example, progress=False, variant=mode)
    assert torch.equal(manager(x=x, variant="one"), x)
    assert torch.equal(manager(x=x, variant="two"), x * 2)
    assert manager.report().generations == 1
    assert {b.variant for b in manager.report().buckets} == {"one", "two"}
    assert manager.explain_call(x=x, variant="three").reason.startswith("not precompiled")
    module.mode = "one"
    manager.precompile(example, progress=False, variant="one", buckets=[Bucket(n=4)])
    assert torch.equal(manager(x=x, variant="two"), x * 2)
    assert manager.explain_call(x=x, variant="one").reason.startswith("not captured")
    with pytest.raises(SpecError, match="variant"):
        CaptureManager(
            lambda variant: variant,
            inputs={"variant": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
        )


@check
def suspended_graphs_give_their_memory_back_and_come_again(device: Device) -> None:
    module = Switched().to(device).requires_grad_(False)
    manager = CaptureManager(module, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4, 8)))
    manager.precompile({"x": ramp(3, device)}, progress=False)
    manager(x=ramp(5, device))
    manager.suspend()
    report = manager.report()
    assert (report.static_bytes, report.pool_bytes, report.buckets) == (0, 0, ())
    assert manager.explain_call(x=ramp(3, device)).reason.startswith("suspended")
    assert torch.equal(manager(x=ramp(3, device)), ramp(3, device))
    module.one.data = module.one * 3  # replaced while nothing was captured
    manager.resume()
    assert torch.equal(manager(x=ramp(5, device)), ramp(5, device) * 3)
    assert [b.bucket["n"] for b in manager.report().buckets] == [4, 8]
    with pytest.raises(SpecError, match="nothing is suspended"):
        manager.resume()
    manager.precompile({"x": ramp(3, device)}, progress=False, variant="again")
    manager.suspend()
    with pytest.raises(SpecError, match="variants"):
        manager.resume()
    manager.resume(variant="again")
    assert manager.explain_call(x=ramp(3, device), variant="again").hit
    assert not manager.explain_call(x=ramp(3, device)).hit


@check
def misses_follow_their_policy(device: Device) -> None:
    strict = doubled(device, on_miss="error")
    with pytest.raises(MissError, match=r"n=17 is beyond") as caught:
        strict(x=ramp(17, device))
    assert caught.value.reason.startswith("beyond the grid")
    assert torch.equal(strict(x=ramp(16, device))["y"], ramp(16, device) * 2)
    assert strict.report().misses == {"beyond the grid": 1}
    lazy = CaptureManager(
        lambda x: x * 2,
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4, 8, 16)),
        on_miss="capture",
    )
    kept = []
    for n in (3, 14, 4, 7, 16, 1, 17, 2):  # small, large, small: no buffer is ever outgrown
        kept.append((n, lazy(x=ramp(n, device, n))))
    for n, result in kept:
        assert torch.equal(result, ramp(n, device, n) * 2)
    report = lazy.report()
    assert report.misses == {"beyond the grid": 1}
    assert {b.bucket["n"] for b in report.buckets} == {4, 16}  # 16 holds 7, so nothing was captured for it
    with pytest.raises(CallError):
        lazy(x=ramp(3, device).double())


@check
def bounds_on_graphs_evict_the_one_used_least_recently(device: Device) -> None:
    manager = CaptureManager(
        lambda x: x * 2,
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4, 8, 16, 32)),
        on_miss="capture",
        max_graphs=2,
        policy="exact",
    )
    for n in (32, 8, 32, 16):
        assert torch.equal(manager(x=ramp(n, device)), ramp(n, device) * 2)
    assert [b.bucket["n"] for b in manager.report().buckets] == [16, 32]  # 8 was used least recently
    assert manager.report().evicted == 1
    with pytest.raises(SpecError, match="max_graphs is 2"):
        manager.precompile({"x": ramp(3, device)}, progress=False)
    assert manager.explain_call(x=ramp(5, device)).reason.startswith("not exact")


@check
def evicting_one_graph_harms_no_other(device: Device) -> None:
    manager = doubled(device)
    before = manager(x=ramp(3, device))
    assert manager.evict(Bucket(n=8))
    assert not manager.evict(Bucket(n=8))
    assert manager.explain_call(x=ramp(6, device)).bucket == Bucket(n=16)
    for n in (3, 6, 12):
        assert torch.equal(manager(x=ramp(n, device))["y"], ramp(n, device) * 2)
    assert manager.evict(Bucket(n=16))
    assert manager.explain_call(x=ramp(6, device)).reason.startswith("not captured")
    assert torch.equal(manager(x=ramp(3, device))["y"], before["y"])
    counted = manager.report()
    assert counted.real_rows == {"n": 3 + 3 + 6 + 12 + 3}
    assert counted.padded_rows == {"n": 1 + 1 + 10 + 4 + 1}
    assert counted.hits == 5


@check
def a_bound_on_bytes_is_kept(device: Device) -> None:
    free = doubled(device, sizes=(4, 1 << 16))
    taken = free.report()
    whole = taken.static_bytes + taken.pool_bytes + taken.executable_bytes + taken.workspace_bytes
    tight = doubled(device, sizes=(4, 1 << 16), max_bytes=whole + (64 << 20))
    assert len(tight.report().buckets) == 2
    with pytest.raises(CaptureFailedError, match="max_bytes") as caught:
        doubled(device, sizes=(4, 1 << 16), max_bytes=max(1, taken.static_bytes // 2))
    assert isinstance(caught.value.__cause__, MemoryBoundError)
    assert torch.equal(free(x=ramp(3, device))["y"], ramp(3, device) * 2)


@check
def replaced_weights_raise_or_run_eagerly_or_are_captured_again(device: Device) -> None:
    for on_stale in ("error", "eager", "recapture"):
        for mode in ("epoch", "always"):
            module = torch.nn.Linear(2, 2, bias=False, device=device).requires_grad_(False)
            module.weight.copy_(torch.eye(2))
            manager = CaptureManager(
                module,
                inputs={"input": rows("n")},
                outputs=rows("n"),
                buckets=BucketGrid(n=(4, 8)),
                on_stale=on_stale,
                check=mode,
            )
            manager.precompile({"input": ramp(3, device)}, progress=False)
            module.weight.mul_(2)
            assert torch.equal(manager(input=ramp(5, device)), ramp(5, device) * 2)
            old, module.weight = module.weight, torch.nn.Parameter(torch.eye(2, device=device) * 3, False)
            if on_stale == "error":
                with pytest.raises(StaleWeights, match=r"Linear\.weight") as caught:
                    manager(input=ramp(5, device))
                assert caught.value.names == ("Linear.weight",)
                with pytest.raises(StaleWeights, match="Linear"), manager.stage(n=3):
                    pass
                module.weight = old
                assert torch.equal(manager(input=ramp(5, device)), ramp(5, device) * 2)
                module.weight = torch.nn.Parameter(torch.eye(2, device=device) * 3, False)
                manager.precompile({"input": ramp(3, device)}, progress=False)
            hits = manager.report().hits
            assert torch.equal(manager(input=ramp(5, device)), ramp(5, device) * 3)
            assert manager.report().hits == hits + (on_stale != "eager")
            if on_stale == "eager":
                assert manager.report().misses == {"stale weights": 1}


@check
def a_capture_on_demand_notices_what_was_replaced_unseen(device: Device) -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(100))
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    module = Wide().to(device).requires_grad_(False)
    manager = CaptureManager(
        module,
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4, 8)),
        on_miss="capture",
    )
    manager(x=ramp(3, device))
    old = module.weight.data
    module.weight.data = torch.full((2,), 5.0, device=device)  # the rotation comes to it later
    with pytest.raises(StaleWeights, match="weight"):
        manager(x=ramp(7, device))
    module.weight.data = old
    assert torch.equal(manager(x=ramp(7, device)), ramp(7, device))
    assert manager.report().hits == 2


@check
def a_variant_is_not_captured_again_in_whatever_state_the_function_is(device: Device) -> None:
    module = Switched().to(device).requires_grad_(False)
    manager = CaptureManager(
        module,
        inputs={"x": rows("n")},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
        on_stale="recapture",
    )
    for mode in ("one", "two"):
        module.mode = mode
        manager.precompile({"x": ramp(3, device)}, progress=False, variant=mode)
    module.one = torch.nn.Parameter(torch.full((2,), 7.0, device=device), False)
    with pytest.raises(StaleWeights, match=r"Switched\.one"):
        manager(x=ramp(3, device), variant="one")  # the module is in mode "two"
    module.mode = "one"
    manager.precompile({"x": ramp(3, device)}, progress=False, variant="one")
    assert torch.equal(manager(x=ramp(3, device), variant="one"), ramp(3, device) * 7)


@check
def another_training_mode_is_a_miss(device: Device) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).to(device).eval()
    manager = CaptureManager(module, inputs={"input": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)))
    manager.precompile({"input": ramp(3, device)}, progress=False)
    module.train()
    assert manager.explain_call(input=ramp(3, device)).reason.startswith("training mode differs")
    module.eval()
    assert manager.explain_call(input=ramp(3, device)).hit


@check
def a_graph_that_differs_from_its_function_fails_verification(device: Device) -> None:
    log: list[int] = []

    def counts_in_a_list(x: torch.Tensor) -> torch.Tensor:
        log.append(1)  # nobody looks into lists: the capture is the fourth run, later ones give something else
        return x * (1 if len(log) < 5 else 100)

    manager = CaptureManager(
        counts_in_a_list, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)), verify=True
    )
    with pytest.raises(CaptureFailedError, match="Python state") as caught:
        manager.precompile({"x": torch.ones(3, device=device)}, progress=False)
    assert isinstance(caught.value.__cause__, VerificationError)
    doubled(device, verify=True)


@check
def inputs_of_any_layout_are_staged_as_they_are(device: Device) -> None:
    manager = CaptureManager(
        lambda x, p, c, s, i: (x * 1, p * 1, torch.view_as_real(c).clone(), s * 1, i * 1),
        inputs={
            "x": rows("n"),
            "p": rows("n", axis=1, fill=-1),
            "c": rows("n"),
            "s": static(),
            "i": rows("n", per=2, fill=3),
        },
        outputs=(rows("n"), rows("n", axis=1), rows("n"), static(), rows("n", per=2)),
        buckets=BucketGrid(n=(4, 8)),
    )
    wide = torch.randn(16, 9, device=device)
    complexes = torch.randn(8, 2, device=device, dtype=torch.complex64)
    integers = torch.arange(24, device=device).view(3, 8)
    manager.precompile(
        {
            "x": wide[:4, :3],
            "p": integers[:, :4],
            "c": complexes[:4],
            "s": wide[0, :2],
            "i": integers[0, :2],
        },
        progress=False,
    )
    for n in (2, 6, 8):
        for x in (wide[:n, :3], wide[: 2 * n : 2, 1:4], wide.T[:n, :3], wide[0, :3].expand(n, 3)):
            for c in (complexes[:n], complexes[:n].conj()):
                got = manager(x=x, p=integers[:, :n], c=c, s=wide[1, 1:5:2], i=integers[1, : n // 2])
                for result, expected in zip(
                    got,
                    (
                        x,
                        integers[:, :n],
                        torch.view_as_real(c.resolve_conj()),
                        wide[1, 1:5:2],
                        integers[1, : n // 2],
                    ),
                    strict=True,
                ):
                    assert torch.equal(result, expected)
    assert manager.report().hits == 3 * 4 * 2
    plain = doubled(device)
    imaginary = torch.randn(3, 2, dtype=torch.complex64, device=device).conj().imag
    for negated in (
        imaginary,
        torch._neg_view(torch.randn(3, 2, device=device)),
    ):  # views that are to be negated
        assert negated.is_neg()
        assert torch.equal(plain(x=negated)["y"], negated * 2)


@check
def a_policy_of_the_users_chooses_and_is_checked(device: Device) -> None:
    class Largest:
        name = "largest"

        def choose(self, sizes: Any, holding: Any, every: Any) -> Choice:
            return Choice(max((c.bucket for c in holding), key=lambda b: b["n"]))

    manager = doubled(device, policy=Largest())
    assert manager.explain_call(x=ramp(3, device)).bucket == Bucket(n=16)
    assert torch.equal(manager(x=ramp(3, device))["y"], ramp(3, device) * 2)
    with pytest.raises(SpecError, match="smallest"):
        doubled(device, policy="bogus")

    class Elsewhere(Largest):
        def choose(self, sizes: Any, holding: Any, every: Any) -> Any:
            return answers.pop()

    for answer in (None, Choice(Bucket(n=64)), Choice(None)):
        answers = [answer]
        lazy = CaptureManager(
            lambda x: x * 2,
            inputs={"x": rows("n")},
            outputs=rows("n"),
            buckets=BucketGrid(n=(4,)),
            on_miss="capture",
            policy=Elsewhere(),
        )
        with pytest.raises(BucketError, match="largest"):
            lazy(x=ramp(3, device))
        assert lazy.report().buckets == ()
    assert torch.equal(doubled(device, policy="cost_aware")(x=ramp(3, device))["y"], ramp(3, device) * 2)


@check
def replays_are_timed_and_marked_where_asked(device: Device) -> None:
    manager = doubled(device, time_every=2, nvtx=True)
    for _ in range(8):
        manager(x=ramp(3, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = manager.report().replay_time
    assert times is not None
    assert times.total >= 1
    assert doubled(device).report().replay_time is None


@check
def a_manager_dropped_without_closing_leaves_nothing(device: Device) -> None:
    for _ in range(3):
        manager = doubled(device)
        assert torch.equal(manager(x=ramp(3, device))["y"], ramp(3, device) * 2)
        del manager
        gc.collect()
    assert torch.equal(doubled(device)(x=ramp(3, device))["y"], ramp(3, device) * 2)


@check
def leases_and_calls_of_several_threads_get_their_own_results(device: Device) -> None:
    manager = doubled(device, on_miss="error")
    failures: list[str] = []

    def work(seed: int) -> None:
        try:
            for step in range(20):
                x = ramp((seed + step) % 16 + 1, device, 100 * seed + step)
                if step % 3 == 0:
                    with manager._core.lock, manager.lease(x=x) as value:
                        same = torch.equal(value["y"], x * 2)
                else:
                    same = torch.equal(manager(x=x)["y"], x * 2)
                if not same:
                    failures.append(f"thread {seed}, step {step}")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
