"""A state machine that drives a `CaptureManager` beside the plain model of `manager_model.py`.

No rule has a precondition, and none draws by what came of another: with several threads that may differ from run to
run.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from manager_model import (
    GRID,
    INPUTS,
    OUTPUTS,
    TOKENS,
    Captured,
    Conditions,
    Layer,
    Model,
    Outcome,
    Plan,
    Variant,
    any_plans,
    assert_same,
    in_order,
    plans,
    same,
)

from mmgraph.capture import (
    Bucket,
    BucketError,
    CallError,
    CallGradientError,
    CaptureFailedError,
    CaptureManager,
    Lease,
    MissError,
    SpecError,
    StaleLeaseError,
    StaleWeights,
)

__all__ = ["ManagerMachine"]


@dataclass
class Held:
    """A lease, what it must read as long as it isn't stale, and when it was made."""

    lease: Lease
    expected: dict[str, Any]
    of_graph: bool
    changes: int
    released: bool = False


ways = st.sampled_from(("copy", "copy", "copy", "into", "into odd", "lease", "no grad"))
some_calls = st.lists(st.tuples(any_plans, ways), max_size=4)
variants, buckets = st.sampled_from((None, None, "b")), st.sampled_from(GRID.buckets)
weights, small = st.sampled_from(("weight", "bias")), st.integers(-3, 3)


def deed(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A method of the machine and its arguments."""
    return st.tuples(st.just(name), *arguments)


deeds = {
    "of weights": deed("update_in_place", weights, small)
    | deed("replace", weights, st.sampled_from(("setattr", "data", "load")), small)
    | deed("put_back"),
    "of modes": deed("set_adapter", st.integers(1, 3))
    | deed("set_training", st.booleans())
    | deed("fail", st.sampled_from(("raise", "read", "python")), st.sampled_from(TOKENS))
    | deed("fail_no_more"),
    "of graphs": deed("evict", buckets, variants)
    | deed("evict", buckets, variants)
    | deed("suspend")
    | deed("resume", st.sampled_from((None, "b", "any", "any")))
    | deed("poison")
    | deed("close"),
    "refused": deed(
        "wrong_call",
        any_plans,
        st.sampled_from(("missing", "unknown", "odd", "differ", "flat", "dtype", "shape", "grad")),
    )
    | deed("wrong_out", plans, st.sampled_from(("shape", "dtype", "structure", "nothing")))
    | deed("wrong_stage", st.sampled_from((-1, True, "missing", "odd")))
    | deed("wrong_precompile", plans, st.sampled_from(("bucket", "none", "missing", "floats", "mapping"))),
}


class ManagerMachine(RuleBasedStateMachine):
    """The machine; a subclass gives the device."""

    device = "cpu"

    @initialize(
        check=st.sampled_from(("epoch", "always")),
        on_stale=st.sampled_from(("error", "recapture", "eager")),
        on_miss=st.sampled_from(("eager", "error", "capture", "capture")),
        policy=st.sampled_from(("smallest", "smallest", "smallest", "exact")),
        max_graphs=st.sampled_from((None, 3, 2, 1)),
        debug=st.booleans(),
        extra=st.sampled_from(({}, {}, {"verify": True}, {"nvtx": True}, {"time_every": 2})),
        filled=st.sampled_from((True, True, False)),
    )
    def start(self, extra: dict[str, Any], filled: bool, **options: Any) -> None:
        self.layer = Layer(self.device)
        self.manager = CaptureManager(
            self.layer, inputs=INPUTS, outputs=OUTPUTS, buckets=GRID, **options, **extra
        )
        self.model = Model(options)
        for name, memory in self.model.weights.bound.items():
            self.model.weights.values[memory] = getattr(self.layer, name).detach().cpu().clone()
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.leases: list[Held] = []
        self.undo: list[tuple[dict[str, int], Callable[[], None]]] = []
        if filled:
            self.precompile(Plan((3, 2), 1, 0), GRID.buckets, False)

    # Calls

    @rule(calls=some_calls)
    def calls(self, calls: list[tuple[Plan, str]]) -> None:
        for plan, how in calls:
            self.call(plan, how)

    @rule(deed=deeds["of weights"], calls=some_calls)
    def change_weights(self, deed: tuple[Any, ...], calls: list[tuple[Plan, str]]) -> None:
        self.do(deed, calls)

    @rule(deed=deeds["of modes"], calls=some_calls)
    def change_modes(self, deed: tuple[Any, ...], calls: list[tuple[Plan, str]]) -> None:
        self.do(deed, calls)

    @rule(deed=deeds["of graphs"], calls=some_calls)
    def change_graphs(self, deed: tuple[Any, ...], calls: list[tuple[Plan, str]]) -> None:
        self.do(deed, calls)

    @rule(deed=deeds["refused"], calls=some_calls)
    def do_wrong(self, deed: tuple[Any, ...], calls: list[tuple[Plan, str]]) -> None:
        self.do(deed, calls)

    def do(self, deed: tuple[Any, ...], calls: list[tuple[Plan, str]]) -> None:
        name, *arguments = deed
        getattr(self, name)(*arguments)
        self.calls(calls)

    def call(self, plan: Plan, how: str) -> None:
        given = plan.inputs(self.device)
        was = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        explained = self.explain(plan, given)
        before = self.model.resolve(plan.sizes, plan.variant, plan.mode, plan.autocast)
        assert explained.hit is (before.graph is not None)
        assert explained.sizes == plan.sizes
        assert explained.reason.partition(":")[0] == before.reason
        if before.graph is not None:
            assert explained.bucket == before.bucket
        found = self.model.serve(plan)
        noise = self.seed(plan.seed)
        with self.under(plan), self.raises(found, plan) as caught:
            result = self.make(plan, given, how, found)
        if not caught:
            assert torch.equal(self.generator_state(), noise.get_state())
            if how == "lease":
                return
            self.kept.append((result, self.model.result(plan, found.bucket, found.graph, self.drawn(plan))))
            assert_same(*self.kept[-1])
        if found.error in (StaleWeights, MissError):
            fresh = torch.Generator(self.device).manual_seed(plan.seed)
            assert torch.equal(self.generator_state(), fresh.get_state())
        if self.model.writes_known:
            for name, value in was.items():
                assert torch.equal(given[name], value), f"{name} of the caller was written"

    def make(self, plan: Plan, given: dict[str, Any], how: str, found: Outcome) -> dict[str, Any]:
        manager, variant = self.manager, plan.variant
        if how == "lease":
            lease = manager.lease(**given, variant=variant)
            expected = self.model.result(plan, found.bucket, found.graph, self.drawn(plan))
            of_graph = found.graph is not None
            assert not lease.stale
            assert_same(lease.get(), expected)
            self.leases.append(Held(lease, expected, of_graph, self.model.changes))
            return {}
        if how.startswith("into"):
            out = self.targets(plan, odd=how == "into odd")
            result: dict[str, Any] = manager.into(out, **given, variant=variant)
            for name in ("main", "low", "noise"):
                assert result[name] is out[name]
            assert result["deep"][1][0] is out["deep"][1][0]
            return result
        if how == "no grad":
            given["x"].requires_grad_()
            with torch.no_grad():
                result = manager(**given, variant=variant)
            given["x"].requires_grad_(False)
            return result
        return manager(*(given[name] for name in INPUTS), variant=variant)

    def targets(self, plan: Plan, *, odd: bool) -> dict[str, Any]:
        def fresh(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            if odd and shape[0]:
                return torch.full((2 * shape[0], *shape[1:]), 7, dtype=dtype, device=self.device)[::2]
            return torch.full(shape, 7, dtype=dtype, device=self.device)

        tokens, batch = plan.tokens, len(plan.lengths)
        return {
            "main": fresh(tokens // 2, 2),
            "deep": [fresh(tokens, 2), (fresh(batch + 1, dtype=torch.int32),)],
            "low": fresh(2),
            "noise": fresh(2),
            "length": None,
            "nothing": None,
        }

    @rule(plan=any_plans, again=st.booleans(), how=st.sampled_from(("replay", "lease", "into")))
    def stage(self, plan: Plan, again: bool, how: str) -> None:
        model, given = self.model, plan.inputs(self.device)
        # What is staged has no constants, so it has those of the capture.
        found = model.resolve(plan.sizes, plan.variant, None, plan.autocast)
        if found.graph is None:
            expected = StaleWeights if found.reason == "stale weights" else MissError
            with self.under(plan), pytest.raises(expected):
                self.manager.stage(plan.sizes, variant=plan.variant).__enter__()
            return
        plan = Plan(
            plan.lengths, plan.tail, plan.seed, model.variants[plan.variant].mode, plan.variant, plan.autocast
        )
        with self.under(plan), self.manager.stage(plan.sizes, variant=plan.variant) as staged:
            assert staged.inputs.keys() == given.keys()
            for name, value in staged.inputs.items():
                if name != "mode":
                    assert value.shape == given[name].shape
                    value.copy_(given[name])
            for turn in range(1 + again):
                if turn:
                    staged.inputs["scale"].copy_(given["scale"])  # the function writes it
                self.seed(plan.seed)
                expected = model.result(plan, found.bucket, found.graph, self.drawn(plan))
                if how == "lease":
                    lease = staged.lease()
                    self.leases.append(Held(lease, expected, True, model.changes))
                    assert_same(lease.get(), expected)
                else:
                    out = self.targets(plan, odd=False)
                    result = staged.replay() if how == "replay" else staged.into(out)
                    self.kept.append((result, expected))
                model.count(plan.variant, found, plan.sizes)

    @rule(
        plans=st.lists(any_plans, min_size=2, max_size=4),
        repeats=st.integers(1, 3),
        evicted=st.sampled_from(GRID.buckets),
    )
    def threads(self, plans: list[Plan], repeats: int, evicted: Bucket) -> None:
        """Each thread's results are right for some bucket that could have served it, whoever came first."""
        model, options = self.model, self.model.options
        if self.model.failure is not None:
            return
        captures = "capture" in (options["on_miss"], options["on_stale"][2:])
        if captures and self.device == "cuda":
            return  # PyTorch lets no thread draw from the default generator while another captures
        errors: list[BaseException] = []
        results: list[tuple[Plan, dict[str, Any]]] = []
        counts = Counter[str]()

        def work(plan: Plan) -> None:
            try:
                for _ in range(repeats):
                    try:
                        with self.under(plan):
                            result = self.manager(**plan.inputs(self.device), variant=plan.variant)
                    except (StaleWeights, MissError) as error:
                        counts[type(error).__name__] += 1
                    else:
                        counts["done"] += 1
                        results.append((plan, result))
            except BaseException as error:
                errors.append(error)

        def meddle() -> None:
            try:
                self.manager.evict(evicted)
                self.manager.report()
                self.manager.poison()
            except BaseException as error:
                errors.append(error)

        graphs = {name: dict(state.graphs) for name, state in model.variants.items()}
        running = [threading.Thread(target=work, args=(plan,)) for plan in plans]
        if not captures:
            running.append(threading.Thread(target=meddle))
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if errors:
            raise errors[0]
        for plan, result in results:
            possible = [model.result(plan, None, None, None)]
            for bucket in GRID:
                if bucket.holds(plan.sizes):
                    now = Captured(model.adapter, model.training)
                    known = graphs.get(plan.variant, {}).get(bucket)
                    possible += [model.result(plan, bucket, graph, None) for graph in (now, known) if graph]
            assert any(same(result, each) for each in possible)
            self.kept.append((result, next(each for each in possible if same(result, each))))
        self.take_over(counts["done"] + counts["MissError"])

    def take_over(self, calls: int) -> None:
        """Takes from the manager what depends on which thread came first."""
        model, report = self.model, self.manager.report()
        model.calls += calls
        assert report.calls == model.calls
        model.misses = Counter(report.misses)
        model.real, model.padded = Counter(report.real_rows), Counter(report.padded_rows)
        model.steps = int(self.layer.steps)
        model.evicted = report.evicted
        model.changes += 1
        store = self.manager._core.store
        stored = store.variants.items() if store is not None else ()
        clocks = {}
        for name, state in stored:
            conditions = Conditions(model.weights.bound, model.training, state.autocast[0])
            known = model.variants.get(name)
            if known is None or set(state.graphs) - set(known.graphs):
                model.suspended.pop(name, None)
                mode = next(iter(state.constants.values()))
                known = model.variants[name] = Variant(mode, conditions, known.graphs if known else {})
                model.writes_known = True
            for bucket, each in state.graphs.items():
                graph = known.graphs.setdefault(bucket, Captured(model.adapter, model.training))
                graph.hits = each.graph.hits
                clocks[name, bucket] = each.graph.clock
            for bucket in set(known.graphs) - set(state.graphs):
                del known.graphs[bucket]
        for name in model.variants.keys() - dict(stored).keys():
            for bucket in list(model.variants[name].graphs):
                del model.variants[name].graphs[bucket]
        model.prune()
        model.used = sorted(clocks, key=lambda key: clocks[key])

    def wrong_call(self, plan: Plan, wrong: str) -> None:
        given = plan.inputs(self.device)
        x = given["x"]
        expected: type[Exception] = CallError
        if wrong == "missing":
            del given["cu"]
        elif wrong == "unknown":
            given["other"] = 1
        elif wrong == "odd":
            given.update(x=torch.cat([x, x.new_zeros(1, 3)]), marks=x.new_zeros(2, plan.tokens + 1))
        elif wrong == "differ":
            given["marks"] = x.new_zeros(2, plan.tokens + 2)
        elif wrong == "flat":
            given["cu"] = given["cu"][None]
        elif wrong == "grad":
            x.requires_grad_()
            expected = CallGradientError
        elif plan.variant not in self.model.variants:
            return  # before a capture nothing says which dtype and shape are right
        elif wrong == "dtype":
            given["x"] = x.float()
        else:
            given["scale"] = given["scale"][None]
        self.seed(plan.seed)
        before = self.generator_state()
        ways = (self.manager, self.manager.lease, self.manager.explain_call)
        with pytest.raises(expected):
            ways[plan.seed % 3](**given, variant=plan.variant)
        assert torch.equal(self.generator_state(), before)

    def wrong_out(self, plan: Plan, wrong: str) -> None:
        found = self.model.resolve(plan.sizes, plan.variant, plan.mode, plan.autocast)
        if found.graph is None:
            return
        out = self.targets(plan, odd=False)
        if wrong == "shape":
            out["main"] = out["main"].new_zeros(plan.tokens // 2 + 1, 2)
        elif wrong == "dtype":
            out["deep"][0] = out["deep"][0].float()
        elif wrong == "structure":
            del out["low"]
        else:
            out["noise"] = None
        with self.under(plan), pytest.raises(CallError):
            self.manager.into(out, **plan.inputs(self.device), variant=plan.variant)

    def wrong_stage(self, wrong: Any) -> None:
        sizes = {"tokens": 3 if wrong == "odd" else 2, "batch": wrong}
        if wrong == "missing":
            del sizes["batch"]
        elif wrong == "odd":
            sizes["batch"] = 1
        with pytest.raises((CallError, BucketError)), self.manager.stage(sizes):
            pass

    # Captures

    @rule(
        plan=plans,
        picked=st.just(GRID.buckets) | st.sets(st.sampled_from(GRID.buckets), min_size=1).map(in_order),
        too_many=st.sampled_from((False, False, False, True)),
    )
    def precompile(self, plan: Plan, picked: tuple[Bucket, ...], too_many: bool) -> None:
        limit = self.model.options["max_graphs"]
        if limit is not None and len(picked) > limit and not too_many:
            picked = picked[:limit]
        given = plan.inputs(self.device)
        was = given["scale"].clone()
        self.seed(plan.seed)
        before = self.generator_state()
        with self.under(plan), contextlib.ExitStack() as stack:
            if limit is not None and len(picked) > limit:
                stack.enter_context(pytest.raises(SpecError, match="max_graphs"))
            else:
                self.model.closed = False
                failed = self.model.capture(plan, picked, replace=True)
                if failed is not None:
                    stack.enter_context(pytest.raises(CaptureFailedError, match=re.escape(str(failed))))
            buckets = None if picked == GRID.buckets else picked
            self.manager.precompile(given, buckets=buckets, variant=plan.variant, progress=False)
        assert torch.equal(self.generator_state(), before)
        assert torch.equal(given["scale"], was)

    def wrong_precompile(self, plan: Plan, wrong: str) -> None:
        given: Any = plan.inputs(self.device)
        buckets: list[Bucket] | None = [GRID.buckets[0]]
        if wrong == "bucket":
            buckets = [Bucket(tokens=5, batch=2)]
        elif wrong == "none":
            buckets = []
        elif wrong == "missing":
            del given["x"]
        elif wrong == "floats":
            given["cu"] = given["cu"].float()
        else:
            given = list(given.values())
        with pytest.raises((CallError, SpecError)):
            self.manager.precompile(given, buckets=buckets, variant=plan.variant, progress=False)

    def fail(self, failure: str, tokens: int) -> None:
        """From now on the function can't be captured at a size."""
        self.layer.failure = self.model.failure = (failure, tokens)

    def fail_no_more(self) -> None:
        self.layer.failure = self.model.failure = None

    def evict(self, bucket: Bucket, variant: Hashable) -> None:
        state = self.model.variants.get(variant)
        there = state is not None and bucket in state.graphs
        if there:
            self.model.drop(variant, bucket)
            self.model.prune()
        assert self.manager.evict(bucket, variant=variant) is there

    def suspend(self) -> None:
        self.model.suspend()
        self.manager.suspend()
        report = self.manager.report()
        assert (report.static_bytes, report.generations, report.buckets) == (0, 0, ())

    def resume(self, variant: Hashable) -> None:
        model = self.model
        named = {} if variant == "any" else {"variant": variant}
        if variant == "any" and len(model.suspended) == 1:
            variant = next(iter(model.suspended))
        if variant not in model.suspended:
            with pytest.raises(SpecError, match="suspended"):
                self.manager.resume(**named)
            return
        mode, buckets = model.suspended[variant]
        failed = model.capture(Plan((), 0, 0, mode, variant), buckets, replace=True)
        with pytest.raises(CaptureFailedError) if failed else contextlib.nullcontext():
            self.manager.resume(**named)

    def close(self) -> None:
        self.manager.close()
        for name in list(self.model.variants):
            self.model.drop_variant(name)
        self.model.suspended.clear()
        self.model.failed.clear()
        self.model.closed = True
        assert all(held.lease.stale for held in self.leases if held.of_graph)

    # Weights and modes

    def update_in_place(self, name: str, value: int) -> None:
        with torch.no_grad():
            getattr(self.layer, name).add_(value)
        weights = self.model.weights
        weights.values[weights.bound[name]].add_(value)

    def replace(self, name: str, how: str, value: int) -> None:
        layer, weights = self.layer, self.model.weights
        old = getattr(layer, name)
        fresh = torch.full_like(old.detach(), value)
        bound = weights.bound
        if how == "data":
            data = old.data
            old.data = fresh
            self.undo.append((bound, lambda: setattr(old, "data", data)))
            self.manager.invalidate()
        elif how == "setattr":
            setattr(layer, name, torch.nn.Parameter(fresh) if name == "weight" else fresh)
            self.undo.append((bound, lambda: setattr(layer, name, old)))
        else:
            others = {key: getattr(layer, key) for key in bound}
            state = {key: tensor.detach().clone() for key, tensor in others.items()}
            layer.load_state_dict({**state, name: fresh}, assign=True)

            def put_back() -> None:
                others["steps"].copy_(layer.steps)
                for key, tensor in others.items():
                    setattr(layer, key, tensor)

            self.undo.append((bound, put_back))
            for key in bound.keys() - {name}:
                weights.renew(key, weights.values[weights.bound[key]])
        weights.renew(name, fresh.cpu())

    def put_back(self) -> None:
        """The weights that were there before are there again, in their own memory."""
        if not self.undo:
            return
        bound, undo = self.undo.pop()
        undo()
        self.model.weights.bound = bound
        self.manager.invalidate()

    def set_adapter(self, adapter: int) -> None:
        """Python's values are those of the capture: what another variant is for."""
        self.layer.adapter = self.model.adapter = adapter

    def set_training(self, training: bool) -> None:
        self.layer.train(training)
        self.model.training = training

    # What must hold

    def poison(self) -> None:
        self.manager.poison()

    @rule(release=st.booleans())
    def read_leases(self, release: bool) -> None:
        if not self.leases:
            return
        for held in self.leases:
            if held.lease.stale:
                assert held.of_graph
                with pytest.raises(StaleLeaseError):
                    held.lease.get()
            else:
                assert_same(held.lease.get(), held.expected)
        last = self.leases[-1]
        if last.changes == self.model.changes and not last.released:
            assert not last.lease.stale
            assert sum(not each.lease.stale and each.of_graph for each in self.leases) <= len(
                self.manager._core.store.generations if self.manager._core.store else ()
            )
        if release:
            last.lease.release()
            last.lease.release()
            last.released = True
            assert last.lease.stale is last.of_graph

    @rule()
    def results_are_what_they_were(self) -> None:
        for result, expected in self.kept:
            assert_same(result, expected)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        model, report = self.model, self.manager.report()
        hits = model.calls - sum(model.misses.values())
        assert (report.calls, report.hits, report.misses) == (model.calls, hits, dict(model.misses))
        captured = {
            (str(name) if name is not None else None, bucket): graph.hits
            for name, state in model.variants.items()
            for bucket, graph in state.graphs.items()
        }
        assert {(b.variant, Bucket(b.bucket)): b.hits for b in report.buckets} == captured
        assert Counter(report.real_rows) == +model.real
        assert Counter(report.padded_rows) == +model.padded
        assert report.evicted == model.evicted
        assert (report.generations > 0) is bool(captured)
        assert int(self.layer.steps) == model.steps
        assert self.layer.python_steps == model.python_steps

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.results_are_what_they_were()
        report = self.manager.report()
        assert json.loads(report.to_json())["calls"] == self.model.calls
        assert f"{report.calls} calls, {report.hits} hits" in str(report)
        self.manager.close()

    # Help

    def explain(self, plan: Plan, given: dict[str, Any]) -> Any:
        with self.under(plan):
            return self.manager.explain_call(**given, variant=plan.variant)

    def under(self, plan: Plan) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=torch.bfloat16) if plan.autocast else contextlib.nullcontext()

    def seed(self, seed: int) -> torch.Generator:
        """Seeds the default generator; gives one that has drawn what one run of the function draws."""
        torch.manual_seed(seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        torch.rand(2, dtype=torch.float64, device=self.device, generator=generator)
        return generator

    def drawn(self, plan: Plan) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(plan.seed)
        return torch.rand(2, dtype=torch.float64, device=self.device, generator=generator).cpu()

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state() if self.device == "cpu" else torch.cuda.get_rng_state()

    @contextlib.contextmanager
    def raises(self, found: Outcome, plan: Plan) -> Iterator[list[Exception]]:
        """Expects the outcome's error, if it has one; gives it."""
        caught: list[Exception] = []
        if found.error is None:
            yield caught
            return
        with pytest.raises(found.error) as info:
            yield caught
        error: Any = info.value
        caught.append(error)
        if found.error is MissError:
            assert error.reason.partition(":")[0] == found.reason
        if found.error is StaleWeights:
            then, now = self.model.variants[plan.variant].conditions.bound, self.model.weights.bound
            assert set(error.names) == {f"Layer.{name}" for name in now if now[name] != then[name]}
