"""Invariant: a policy serves a call from a bucket that holds it, and leaves it to eager only where that is measured."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.capture import Bucket, BucketError, BucketGrid, SpecError
from mmgraph.capture.costs import CostSurface
from mmgraph.capture.policies import (
    BucketPolicy,
    Candidate,
    Choice,
    check_choice,
    cost_aware,
    exact,
    policy_of,
    smallest,
)

Point = tuple[int, ...]
times = st.floats(0.001, 10.0)


@st.composite
def surfaces(draw: st.DrawFn) -> tuple[int, dict[Point, float]]:
    names = draw(st.integers(1, 3))
    points = st.tuples(*[st.integers(1, 12)] * names)
    return names, draw(st.dictionaries(points, times, min_size=1, max_size=8))


def named(point: Point) -> dict[str, int]:
    return {f"d{i}": size for i, size in enumerate(point)}


def surface_of(costs: Mapping[Point, float]) -> CostSurface:
    return CostSurface((named(point), cost) for point, cost in costs.items())


def holds(large: Point, small: Point) -> bool:
    return all(a >= b for a, b in zip(large, small, strict=True))


def raised(costs: Mapping[Point, float]) -> dict[Point, float]:
    return {p: max(cost for q, cost in costs.items() if holds(p, q)) for p in costs}


def estimate_by_definition(costs: Mapping[Point, float], sizes: Point) -> float | None:
    costs = raised(costs)

    def line(low: Point, high: Point, at: Point) -> float:
        shares = [(s - a) / (b - a) for s, a, b in zip(at, low, high, strict=True) if a != b]
        return costs[low] + (costs[high] - costs[low]) * max(0.0, *shares, 0.0)

    def through(low: Point, at: Point, high: Point) -> bool:
        shares = {Fraction(s - a, b - a) for s, a, b in zip(at, low, high, strict=True) if a != b}
        same = all(s == a for s, a, b in zip(at, low, high, strict=True) if a == b)
        return same and len(shares) == 1 and 0 < shares.pop() < 1

    found = []
    for low, high in itertools.product(costs, costs):
        if holds(high, low) and holds(high, sizes):
            under = [p for p in costs if p != high and holds(high, p)]
            if any(through(low, p, high) for p in under):
                continue
            if all(line(low, high, p) >= costs[p] for p in under):
                found.append(line(low, high, sizes))
    return min((*found, *(c for p, c in costs.items() if holds(p, sizes))), default=None)


@given(surfaces(), st.data())
def test_an_estimate_is_the_definition_and_lies_between_what_was_measured(
    drawn: tuple[int, dict[Point, float]], data: st.DataObject
) -> None:
    names, costs = drawn
    surface = surface_of(costs)
    floor = raised(costs)
    for sizes in data.draw(st.lists(st.tuples(*[st.integers(0, 13)] * names), min_size=1, max_size=6)):
        got = surface.estimate(named(sizes))
        assert got == estimate_by_definition(costs, sizes)
        above = [cost for point, cost in floor.items() if holds(point, sizes)]
        assert (got is None) == (not above)
        if got is not None:
            assert max((c for p, c in costs.items() if holds(sizes, p)), default=0.0) <= got <= min(above)


@given(surfaces(), st.data())
def test_a_larger_call_is_never_estimated_cheaper(
    drawn: tuple[int, dict[Point, float]], data: st.DataObject
) -> None:
    names, costs = drawn
    surface = surface_of(costs)
    small = data.draw(st.tuples(*[st.integers(0, 12)] * names))
    large = tuple(size + data.draw(st.integers(0, 4)) for size in small)
    low, high = surface.estimate(named(small)), surface.estimate(named(large))
    assert high is None or (low is not None and low <= high)


def test_with_one_size_the_estimate_is_linear_between_neighbours_and_constant_below_the_first() -> None:
    for shape in ([1.0, 2.0, 2.5], [1.0, 1.2, 4.0]):  # concave, convex
        surface = surface_of(dict(zip([(4,), (8,), (16,)], shape, strict=True)))
        assert surface.estimate(named((6,))) == pytest.approx((shape[0] + shape[1]) / 2)
        assert surface.estimate(named((14,))) == pytest.approx(shape[1] + (shape[2] - shape[1]) * 6 / 8)
        assert surface.estimate(named((1,))) == surface.estimate(named((4,))) == shape[0]
        assert surface.estimate(named((17,))) is None


def test_many_points_cost_no_accuracy_next_to_them() -> None:
    costs = {(n,): float(n) ** 1.5 for n in range(1, 200)}
    surface = surface_of(costs)
    assert [surface.estimate(named(point)) for point in costs] == pytest.approx(list(costs.values()))


@st.composite
def grids_and_calls(draw: st.DrawFn) -> tuple[BucketGrid, tuple[Candidate, ...], list[dict[str, int]]]:
    lists = st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True).map(sorted)
    derived = {"windows": lambda b: b["tokens"] // 4 + b["batch"]} if draw(st.booleans()) else None
    grid = BucketGrid(derived=derived, tokens=draw(lists), batch=draw(lists))
    captured = draw(st.lists(st.sampled_from(grid.buckets), unique=True, min_size=1))
    maybe = st.none() | times
    replay = maybe if draw(st.booleans()) else times
    every = tuple(
        Candidate(bucket, draw(st.integers(1, 5)), draw(replay), draw(maybe))
        for bucket in grid.buckets
        if bucket in captured
    )
    sizes = st.fixed_dictionaries({name: st.integers(0, 33) for name in grid.names})
    on_the_grid = st.sampled_from(grid.buckets).map(dict)
    return grid, every, draw(st.lists(sizes | on_the_grid, min_size=1, max_size=4))


@given(grids_and_calls(), st.sampled_from(["smallest", "exact", "cost_aware"]), st.floats(0, 0.9))
def test_choices_are_those_of_brute_force(
    drawn: tuple[BucketGrid, tuple[Candidate, ...], list[dict[str, int]]], which: str, margin: float
) -> None:
    grid, every, calls = drawn
    policy = cost_aware(margin) if which == "cost_aware" else policy_of(which)
    measured = {tuple(c.bucket.values()): c.eager_seconds for c in every if c.eager_seconds is not None}
    for sizes in calls:
        holding = [c for c in every if grid.holds(c.bucket, sizes)]
        choice = check_choice(policy.choose(sizes, holding, every), holding, policy)
        fewest = next((c for c in holding if all(c.elements <= other.elements for other in holding)), None)
        if fewest is None:
            assert choice.bucket is None
        elif which == "smallest":
            assert choice.bucket == fewest.bucket
        elif which == "exact":
            same = next((c.bucket for c in holding if dict(c.bucket) == sizes), None)
            assert choice.bucket == same
            assert choice.reason.startswith("not exact: ") == (same is None)
        elif any(c.replay_seconds is None for c in holding):
            assert choice.bucket == fewest.bucket
        else:
            best = sorted(holding, key=lambda c: (c.replay_seconds, c.elements, every.index(c)))[0]
            eager = estimate_by_definition(measured, tuple(sizes[name] for name in best.bucket))
            assert best.replay_seconds is not None
            if eager is not None and eager < (1 - margin) * best.replay_seconds:
                assert choice.bucket is None
                assert choice.reason.startswith("eager is faster: ")
            else:
                assert choice.bucket == best.bucket


def one_dim(*rows: tuple[int, float | None, float | None]) -> tuple[Candidate, ...]:
    return tuple(Candidate(Bucket(tokens=size), size, replay, eager) for size, replay, eager in rows)


def choose(policy: BucketPolicy, every: Sequence[Candidate], **sizes: int) -> Choice:
    holding = [c for c in every if c.bucket.holds(sizes)]
    return check_choice(policy.choose(sizes, holding, every), holding, policy)


def test_the_fault_a_replay_in_a_much_larger_bucket_that_is_slower_than_eager() -> None:
    every = one_dim((1024, 1e-3, 2e-3), (65536, 40e-3, 41e-3))
    call = {"tokens": 1030}  # padded 64-fold
    assert choose(smallest(), every, **call) == Choice(Bucket(tokens=65536))
    assert choose(cost_aware(), every, **call) == Choice(None, "eager is faster: 2.00 ms against 40.00 ms")
    assert choose(cost_aware(0.9499), every, **call).bucket is None
    assert choose(cost_aware(0.96), every, **call).bucket == Bucket(tokens=65536)


def test_savings_that_were_not_measured_are_not_promised() -> None:
    call = {"tokens": 5}
    known = one_dim((8, 1.0, 1.5), (16, 3.0, 2.0))
    assert choose(cost_aware(), known, **call).bucket == Bucket(tokens=8)
    # Below the first measured point a call is taken to cost as much as that point, though less is likely.
    assert choose(cost_aware(), one_dim((1024, 1.0, 1.5)), tokens=1).bucket == Bucket(tokens=1024)
    # No eager time of a bucket that holds the call.
    assert choose(cost_aware(), one_dim((4, 1.0, 0.1), (8, 9.0, None)), **call).bucket == Bucket(tokens=8)
    # A replay time is missing.
    assert choose(cost_aware(), one_dim((8, None, 0.1), (16, 1.0, 0.1)), **call).bucket == Bucket(tokens=8)
    assert choose(cost_aware(), one_dim((8, 1.0, 0.1), (16, None, 0.1)), **call).bucket == Bucket(tokens=8)


def test_a_larger_bucket_that_replays_faster_is_taken() -> None:
    assert choose(cost_aware(), one_dim((8, 3.0, 9.0), (16, 2.0, 9.0)), tokens=5).bucket == Bucket(tokens=16)


def test_of_equally_fast_replays_the_one_with_fewer_elements_is_taken() -> None:
    first, second = Bucket(tokens=8, batch=9), Bucket(tokens=9, batch=1)
    every = (Candidate(first, 72, 1.0, None), Candidate(second, 9, 1.0, None))
    assert choose(cost_aware(), every, tokens=5, batch=1).bucket == second


@dataclass(frozen=True)
class Cost:
    """Launches, work per token, and attention over padded sequences: grows with each size, convex on every line."""

    launches: float
    per_token: float
    per_square: float

    def __call__(self, sizes: Mapping[str, int]) -> float:
        padded = sizes["batch"] * sizes["seqlen"] ** 2
        return self.launches + self.per_token * sizes["tokens"] + self.per_square * padded


@pytest.mark.parametrize("launches", [0.0, 2e-3, 50e-3])
@pytest.mark.parametrize("seed", range(3))
def test_on_a_synthetic_cost_surface_traffic_costs_no_more_than_either_rule_alone(
    launches: float, seed: int
) -> None:
    eager, replay = Cost(launches, 1e-6, 1e-10), Cost(50e-6, 1e-6, 1e-10)
    grid = BucketGrid(tokens=(1024, 4096, 16384), batch=(1, 8, 32), seqlen=(256, 1024, 4096))
    every = tuple(Candidate(b, b["tokens"], replay(b), eager(b)) for b in grid.buckets)
    surface = CostSurface((c.bucket, eager(c.bucket)) for c in every)
    policy = cost_aware()
    draw = random.Random(seed)
    total = always_replay = always_eager = error = 0.0
    eager_calls = 0
    for _ in range(500):
        batch = draw.randint(1, 32)
        seqlen = draw.randint(1, 4096)
        tokens = min(16384, max(seqlen, draw.randint(1, 16384)))
        sizes = {"tokens": tokens, "batch": batch, "seqlen": seqlen}
        holding = [c for c in every if grid.holds(c.bucket, sizes)]
        choice = check_choice(policy.choose(sizes, holding, every), holding, policy)
        first = smallest().choose(sizes, holding, every).bucket
        assert first is not None
        estimate = surface.estimate(sizes)
        assert estimate is not None
        assert estimate >= eager(sizes) * (1 - 1e-9)
        total += eager(sizes) if choice.bucket is None else replay(choice.bucket)
        eager_calls += choice.bucket is None
        always_replay += replay(first)
        always_eager += eager(sizes)
        error += estimate - eager(sizes)
    assert total <= always_replay * (1 + 1e-9)
    assert total <= always_eager + error + 1e-9
    # Without launches to save padding is pure loss; with very many of them replays win every time.
    assert {0.0: eager_calls > 250, 2e-3: 0 < eager_calls < 500, 50e-3: eager_calls < 250}[launches]


@pytest.mark.parametrize("policy", [smallest(), exact(), cost_aware()])
def test_where_nothing_holds_nothing_is_chosen(policy: BucketPolicy) -> None:
    assert choose(policy, one_dim((8, 1.0, 1.0)), tokens=9) == Choice(None, "no bucket holds the call")


def test_exact_says_how_the_nearest_differs() -> None:
    assert choose(exact(), one_dim((8, 1.0, 1.0), (16, 1.0, 1.0)), tokens=7) == Choice(
        None, "not exact: tokens=7 is not 8"
    )


def test_one_policy_serves_several_managers() -> None:
    policy = cost_aware()
    for _ in range(3):
        for eager in range(1, 60):  # more than are remembered
            every = one_dim((8, 30.0, float(eager)))
            assert (choose(policy, every, tokens=8).bucket is None) == (eager < 30)


def test_candidates_in_a_list_may_change_between_calls() -> None:
    policy, every = cost_aware(), list(one_dim((8, 2.0, 1.0)))
    assert choose(policy, every, tokens=8).bucket is None
    every[:] = one_dim((8, 2.0, 3.0))
    assert choose(policy, every, tokens=8).bucket == Bucket(tokens=8)


def test_policies_by_name_and_objects() -> None:
    assert [policy_of(name).name for name in ("smallest", "exact", "cost_aware")] == [
        "smallest",
        "exact",
        "cost_aware",
    ]
    mine = Mine(Choice(None, "mine"))
    assert policy_of(mine) is mine


@pytest.mark.parametrize("bad", ["largest", "", 3, None, cost_aware, Bucket, st.none()])
def test_other_policies_are_errors_that_list_the_known(bad: object) -> None:
    with pytest.raises(SpecError, match="'smallest', 'exact', 'cost_aware'"):
        policy_of(bad)  # type: ignore[arg-type]


@dataclass
class Mine:
    answer: object
    name: str = "mine"

    def choose(self, sizes: Mapping[str, int], holding: object, every: object) -> Choice:
        return self.answer  # type: ignore[return-value]


def test_a_policy_needs_a_name() -> None:
    with pytest.raises(SpecError, match="needs a name"):
        policy_of(Mine(None, name=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [-0.1, 1.0, 7, True, "0.1", float("nan")])
def test_margins_are_shares(margin: object) -> None:
    with pytest.raises(SpecError, match="margin"):
        cost_aware(margin)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Choice(Bucket(tokens=8)), "not among the captured buckets that hold the call"),
        (Choice(Bucket(tokens=17)), "not among the captured buckets that hold the call"),
        (Choice(None), "no reason"),
        (Choice(None, " : slow"), "no reason"),
        (Bucket(tokens=16), "must return a Choice"),
        (None, "must return a Choice"),
    ],
)
def test_a_policy_that_answers_badly_is_named(answer: object, says: str) -> None:
    every = one_dim((8, 1.0, 1.0), (16, 1.0, 1.0))
    with pytest.raises(BucketError, match=f"'mine'.*{says}"):
        choose(Mine(answer), every, tokens=9)
    assert choose(Mine(Choice(Bucket(tokens=16))), every, tokens=9).bucket == Bucket(tokens=16)
