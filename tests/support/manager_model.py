"""The plain model beside a `CaptureManager`: what is captured, and what each call gets.

All numbers are integers in float64, so results agree to the bit. One output is the sum of an input's rows and padding,
so it tells which bucket served a call; another is random, so it tells how often the generator was used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from mmgraph.capture import (
    Bucket,
    BucketGrid,
    MissError,
    StaleWeights,
    constant,
    offsets,
    rows,
    static,
)

TOKENS, BATCHES, FILL = (4, 8, 16), (2, 4), -2.0
GRID = BucketGrid(tokens=TOKENS, batch=BATCHES)
INPUTS = {
    "x": rows("tokens"),
    "cu": offsets("batch", of="tokens"),
    "marks": rows("tokens", axis=1, fill=FILL),
    "scale": static(),
    "mode": constant(),
}
OUTPUTS: dict[str, Any] = {
    "main": rows("tokens", per=2),
    "deep": [rows("tokens"), (offsets("batch", of="tokens"),)],
    "low": static(),
    "noise": static(),
    "length": constant(),
    "nothing": None,
}


def formula(
    call: dict[str, Any], weight: torch.Tensor, bias: torch.Tensor, adapter: int, training: bool
) -> dict[str, Any]:
    """All of the function but its counter and its noise. It writes `scale`."""
    x, cu, marks = call["x"], call["cu"], call["marks"]
    call["scale"].add_(1)
    place = torch.arange(x.shape[0], device=x.device)[None]
    inside = ((place >= cu[:-1, None]) & (place < cu[1:, None])).to(x.dtype)
    y = (inside.T @ (inside @ x) * call["scale"] + x) @ weight + bias * call["mode"]
    y = y * adapter + (1000 if training else 0)
    return {
        "main": y.reshape(x.shape[0] // 2, 2, 2).sum(1),
        "deep": [y * 2, (cu * 2,)],
        "low": marks.sum(1),
        "length": 3,
        "nothing": None,
    }


class Layer(torch.nn.Module):
    """The function: its weights, a mode that Python tells, a counter, and ways to fail."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6, dtype=torch.float64, device=device).reshape(3, 2))
        self.register_buffer("bias", torch.ones(2, dtype=torch.float64, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.adapter, self.python_steps = 1, 0
        self.failure: tuple[str, int] | None = None

    def forward(
        self, x: torch.Tensor, cu: torch.Tensor, marks: torch.Tensor, scale: torch.Tensor, mode: int
    ) -> dict[str, Any]:
        failure = self.failure[0] if self.failure is not None and x.shape[0] == self.failure[1] else ""
        if failure == "raise":
            raise ArithmeticError("as asked for")
        self.steps.add_(1)
        if failure == "read":
            scale = scale * (1 + 0 * int(scale.sum().item()))
        elif failure == "python":
            self.python_steps += 1
        call = {"x": x, "cu": cu, "marks": marks, "scale": scale, "mode": mode}
        noise = torch.rand(2, dtype=torch.float64, device=x.device)
        return {**formula(call, self.weight, self.bias, self.adapter, self.training), "noise": noise}


@dataclass(frozen=True)
class Plan:
    """One call, before it is made: hypothesis shows this."""

    lengths: tuple[int, ...]
    tail: int
    seed: int
    mode: int = 1
    variant: Hashable = None
    autocast: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.tail + (sum(self.lengths) + self.tail) % 2

    @property
    def sizes(self) -> dict[str, int]:
        return {"tokens": self.tokens, "batch": len(self.lengths)}

    def inputs(self, device: str) -> dict[str, Any]:
        """The arguments; the same ones each time."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = lambda *shape: torch.randint(-9, 9, shape, generator=generator).double().to(device)  # noqa: E731
        cuts = [0, *torch.tensor(self.lengths, dtype=torch.int64).cumsum(0).tolist()]
        return {
            "x": draw(self.tokens, 3),
            "cu": torch.tensor(cuts, dtype=torch.int32, device=device),
            "marks": draw(2, self.tokens),
            "scale": draw(1),
            "mode": self.mode,
        }


plans = st.builds(
    Plan,
    st.lists(st.integers(0, 5), max_size=5).map(tuple),
    st.integers(0, 3),
    st.integers(0, 2**20),
    st.sampled_from((1,) * 9 + (2,)),
    st.sampled_from((None, None, None, None, None, "b")),
    st.sampled_from((False,) * 9 + (True,)),
)
exact_plans = st.builds(
    lambda bucket, seed, variant: Plan(
        (bucket["tokens"] // bucket["batch"],) * bucket["batch"], 0, seed, 1, variant
    ),
    st.sampled_from(GRID.buckets),
    st.integers(0, 2**20),
    st.sampled_from((None, None, "b")),
)
any_plans = plans | exact_plans


def in_order(buckets: Collection[Bucket]) -> tuple[Bucket, ...]:
    return tuple(bucket for bucket in GRID if bucket in buckets)


@dataclass
class Weights:
    """Which memory each name is bound to, and the values in each memory that there ever was."""

    bound: dict[str, int] = field(default_factory=lambda: {"weight": 0, "bias": 1, "steps": 2})
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def renew(self, name: str, value: torch.Tensor) -> None:
        memory = len(self.values)
        self.values[memory] = value.clone()
        self.bound = {**self.bound, name: memory}


@dataclass(frozen=True)
class Conditions:
    """What a graph was captured under: it serves calls under the same."""

    bound: dict[str, int]
    training: bool
    autocast: bool


@dataclass
class Captured:
    """A graph in the model, with what it bakes in of Python's values."""

    adapter: int
    training: bool
    hits: int = 0


@dataclass
class Variant:
    mode: int
    conditions: Conditions
    graphs: dict[Bucket, Captured] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a call gets: a graph's replay, a miss's run, or an error (which is `error`)."""

    bucket: Bucket | None = None
    graph: Captured | None = None
    reason: str = ""
    error: type[Exception] | None = None


class Model:
    """What the manager promises, in plain Python."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.variants: dict[Hashable, Variant] = {}
        self.suspended: dict[Hashable, tuple[int, tuple[Bucket, ...]]] = {}
        self.used: list[tuple[Hashable, Bucket]] = []  # the one used least recently first
        self.failed: set[tuple[Hashable, Bucket]] = set()  # not captured on demand any more
        self.weights = Weights()
        self.adapter, self.training = 1, True
        self.failure: tuple[str, int] | None = None
        self.calls, self.evicted, self.steps, self.python_steps = 0, 0, 0, 0
        self.misses: Counter[str] = Counter()
        self.real: Counter[str] = Counter()
        self.padded: Counter[str] = Counter()
        self.changes = 0  # of what is captured
        self.closed = False
        self.writes_known = False

    def now(self, autocast: bool = False) -> Conditions:
        return Conditions(self.weights.bound, self.training, autocast)

    def failing(self, tokens: int) -> str:
        return self.failure[0] if self.failure is not None and self.failure[1] == tokens else ""

    def resolve(self, sizes: dict[str, int], variant: Hashable, mode: int | None, autocast: bool) -> Outcome:
        if variant in self.suspended:
            return Outcome(reason="suspended")
        state = self.variants.get(variant)
        if state is None:
            failed = (variant, GRID.choose(sizes)) in self.failed
            return Outcome(reason="capture failed" if failed else "not precompiled")
        if mode is not None and mode != state.mode:
            return Outcome(reason="constant changed")
        if GRID.choose(sizes) is None:
            return Outcome(reason="beyond the grid")
        holding = [bucket for bucket in state.graphs if bucket.holds(sizes)]
        if not holding:
            bucket = GRID.choose(sizes)
            failed = "capture failed" if (variant, bucket) in self.failed else "not captured"
            return Outcome(bucket, reason=self.why_not_now(variant, autocast) or failed)
        bucket = min(holding, key=lambda b: (b["tokens"], b["batch"]))
        if self.options["policy"] == "exact":
            if Bucket(sizes) not in holding:
                return Outcome(reason="not exact")
            bucket = Bucket(sizes)
        reason = self.why_not_now(variant, autocast)
        return Outcome(bucket, reason=reason) if reason else Outcome(bucket, state.graphs[bucket])

    def why_not_now(self, variant: Hashable, autocast: bool) -> str:
        then, now = self.variants[variant].conditions, self.now(autocast)
        if then.autocast != now.autocast:
            return "autocast differs"
        if then.training != now.training and variant is None:  # another variant may be just that mode
            return "training mode differs"
        return "stale weights" if then.bound != now.bound else ""

    def serve(self, plan: Plan) -> Outcome:
        """A call's outcome, once what it captures is captured."""
        found = self.resolve(plan.sizes, plan.variant, plan.mode, plan.autocast)
        if found.graph is not None:
            return self.counted(found, plan)
        options = self.options
        stale = found.reason == "stale weights"
        if stale and options["on_stale"] == "error":
            return Outcome(error=StaleWeights)
        wanted: set[Bucket] = set()
        fits = found.bucket or GRID.choose(plan.sizes)
        on_demand = options["on_miss"] == "capture" and not self.closed and fits is not None
        if stale and options["on_stale"] == "recapture":
            wanted = {*self.variants[plan.variant].graphs, *([fits] if on_demand else [])}
        elif on_demand and found.reason in ("not captured", "not precompiled", "not exact"):
            there = plan.variant in self.variants and fits in self.variants[plan.variant].graphs
            taken = options["policy"] != "exact" or Bucket(plan.sizes) == fits
            if taken and not there and (plan.variant, fits) not in self.failed:
                wanted = {fits}
        for number, bucket in enumerate(sorted(wanted, key=lambda b: tuple(b.values()), reverse=True)):
            if self.capture(plan, (bucket,), replace=stale and number == 0) is not None:
                self.failed.add((plan.variant, bucket))
        if wanted:
            found = self.resolve(plan.sizes, plan.variant, plan.mode, plan.autocast)
            if found.graph is not None:
                return self.counted(found, plan)
        self.calls += 1
        self.misses[found.reason] += 1
        asked = found.reason == "stale weights" and options["on_stale"] == "eager"
        if options["on_miss"] == "error" and not asked:
            return Outcome(reason=found.reason, error=MissError)
        return self.ran(found, plan.tokens)

    def ran(self, found: Outcome, tokens: int) -> Outcome:
        """The function itself runs."""
        failing = self.failing(tokens)
        if failing == "raise":
            return Outcome(reason=found.reason, error=ArithmeticError)
        self.steps += 1
        self.python_steps += failing == "python"
        return found

    def counted(self, found: Outcome, plan: Plan) -> Outcome:
        self.count(plan.variant, found, plan.sizes)
        return found

    def count(self, variant: Hashable, found: Outcome, sizes: dict[str, int]) -> None:
        assert found.bucket is not None
        assert found.graph is not None
        self.calls += 1
        self.steps += 1
        found.graph.hits += 1
        for name, size in sizes.items():
            self.real[name] += size
            self.padded[name] += found.bucket[name] - size
        self.use(variant, found.bucket)

    def use(self, variant: Hashable, bucket: Bucket) -> None:
        key = (variant, bucket)
        self.used = [other for other in self.used if other != key] + [key]

    def drop(self, variant: Hashable, bucket: Bucket) -> None:
        del self.variants[variant].graphs[bucket]
        self.used.remove((variant, bucket))
        self.changes += 1

    def drop_variant(self, variant: Hashable) -> None:
        for bucket in list(self.variants[variant].graphs):
            self.drop(variant, bucket)
        del self.variants[variant]

    def prune(self) -> None:
        """Forgets variants without a graph."""
        for variant in [name for name, state in self.variants.items() if not state.graphs]:
            del self.variants[variant]

    def capture(self, plan: Plan, buckets: tuple[Bucket, ...], *, replace: bool) -> Bucket | None:
        """Captures as long as it goes well; the bucket that fails."""
        failed = self.captured(plan, buckets, replace=replace)
        self.prune()
        return failed

    def captured(self, plan: Plan, buckets: tuple[Bucket, ...], *, replace: bool) -> Bucket | None:
        """Captures as long as it goes well, and forgets nothing."""
        now = self.now(plan.autocast)
        if replace:
            self.failed = {key for key in self.failed if key[0] != plan.variant}
            if plan.variant in self.variants:
                self.drop_variant(plan.variant)
        self.suspended.pop(plan.variant, None)
        state = self.variants.setdefault(plan.variant, Variant(plan.mode, now))
        state.conditions = now  # as they were where there are graphs already
        for bucket in sorted(buckets, key=lambda b: tuple(b.values()), reverse=True):
            failing = self.failing(bucket["tokens"])
            if failing in ("raise", "python"):
                return bucket
            limit = self.options["max_graphs"]
            while limit is not None and len(self.used) >= limit:
                self.drop(*self.used[0])
                self.evicted += 1
            if failing == "read":  # found only by the capture itself
                return bucket
            state.graphs[bucket] = Captured(self.adapter, self.training)
            self.use(plan.variant, bucket)
            self.changes += 1
            self.writes_known = True
        return None

    def suspend(self) -> None:
        for name, state in self.variants.items():
            if state.graphs:
                self.suspended[name] = (state.mode, tuple(state.graphs))
        for name in list(self.variants):
            self.drop_variant(name)

    def result(
        self, plan: Plan, bucket: Bucket | None, graph: Captured | None, noise: torch.Tensor | None
    ) -> dict[str, Any]:
        """The function on the inputs padded to a bucket, cut again; on the inputs as they are where there is none."""
        call, sizes = plan.inputs("cpu"), plan.sizes
        if bucket is not None and graph is not None:
            more, sequences = bucket["tokens"] - sizes["tokens"], bucket["batch"] - sizes["batch"]
            call["x"] = torch.nn.functional.pad(call["x"], (0, 0, 0, more))
            call["marks"] = torch.nn.functional.pad(call["marks"], (0, more), value=FILL)
            call["cu"] = torch.cat([call["cu"], call["cu"][-1:].expand(sequences)])
        adapter = graph.adapter if graph is not None else self.adapter
        training = graph.training if graph is not None else self.training
        values = [self.weights.values[self.weights.bound[name]] for name in ("weight", "bias")]
        full = formula(call, *values, adapter, training)
        return {
            **full,
            "main": full["main"][: sizes["tokens"] // 2],
            "deep": [full["deep"][0][: sizes["tokens"]], (full["deep"][1][0][: sizes["batch"] + 1],)],
            "noise": noise,
        }


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two results agree to the bit; `expected` is on the CPU, and its noise is None where it isn't known."""
    pairs = [
        (got["main"], expected["main"]),
        (got["deep"][0], expected["deep"][0]),
        (got["deep"][1][0], expected["deep"][1][0]),
        (got["low"], expected["low"]),
    ]
    if expected["noise"] is not None:
        pairs.append((got["noise"], expected["noise"]))
    return (
        got.keys() == expected.keys()
        and isinstance(got["deep"], list)
        and isinstance(got["deep"][1], tuple)
        and (got["length"], got["nothing"]) == (3, None)
        and all(a.dtype == b.dtype and torch.equal(a.detach().cpu(), b) for a, b in pairs)
    )


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert same(got, expected), f"got {got}, expected {expected}"
