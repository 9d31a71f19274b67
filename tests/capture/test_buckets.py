"""Invariant: a call gets the smallest bucket that holds it, beyond the grid a miss; every kept bucket is reachable."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.capture import (
    ENCODER_BATCH_BUCKETS,
    ENCODER_SEQLEN_BUCKETS,
    Bucket,
    BucketError,
    BucketGrid,
    round_up_to_bucket,
)

size_lists = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.integers(-5, 500), size_lists)
def test_rounding_is_the_least_bucket_then_multiples_of_the_last(value: int, buckets: list[int]) -> None:
    got = round_up_to_bucket(value, buckets)
    every = itertools.chain(buckets, (buckets[-1] * n for n in itertools.count(2)))
    assert got == next(b for b in every if b >= value)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 8), (-3, 8), (8, 8), (9, 16), (64, 64), (65, 128), (129, 192)]
)
def test_rounding_of_encoder_batches(value: int, expected: int) -> None:
    assert round_up_to_bucket(value, ENCODER_BATCH_BUCKETS) == expected


def test_default_sequence_buckets_double_from_4096_to_131072() -> None:
    assert ENCODER_SEQLEN_BUCKETS == (4096, 8192, 16384, 32768, 65536, 131072)


@pytest.mark.parametrize("bad", [(), (8, 4), (4, 4), (0, 4), (-1,), (True, 2), (1.5,), "12", 5, [None]])
def test_bad_bucket_lists_are_errors_that_say_so(bad: object) -> None:
    with pytest.raises(BucketError):
        round_up_to_bucket(3, bad)  # type: ignore[arg-type]
    with pytest.raises(BucketError, match="tokens"):
        BucketGrid(tokens=bad)  # type: ignore[arg-type]
    assert round_up_to_bucket(3, (4,)) == 4


@pytest.mark.parametrize("value", [2.5, "3", None, True])
def test_rounding_takes_integers_only(value: object) -> None:
    with pytest.raises(BucketError, match="value must be an integer"):
        round_up_to_bucket(value, (4,))  # type: ignore[arg-type]


def brute_force(grid: BucketGrid, sizes: dict[str, int]) -> Bucket | None:
    if "seqlen" in sizes:
        sizes = {**sizes, "seqlen": min(sizes["seqlen"], sizes["tokens"])}
    fitting = [b for b in grid.buckets if all(b[name] >= size for name, size in sizes.items())]
    return min(fitting, key=lambda b: tuple(b[name] for name in grid.names), default=None)


@given(
    tokens=size_lists,
    batch=size_lists,
    seqlen=size_lists,
    hole=st.integers(0, 5),
    sizes=st.fixed_dictionaries(
        {"tokens": st.integers(0, 45), "batch": st.integers(0, 45), "seqlen": st.integers(0, 45)}
    ),
)
def test_choice_equals_a_search_of_all_buckets(
    tokens: list[int], batch: list[int], seqlen: list[int], hole: int, sizes: dict[str, int]
) -> None:
    try:
        grid = BucketGrid(
            tokens=tokens, batch=batch, seqlen=seqlen, keep=lambda b: (b["tokens"] + b["batch"]) % 6 != hole
        )
    except BucketError:
        return  # the predicate left nothing
    chosen = grid.choose(sizes)
    assert chosen == brute_force(grid, sizes)
    if chosen is None:
        assert grid.why_none(sizes)


@given(
    tokens=size_lists,
    batch=size_lists,
    factor=st.integers(1, 5),
    sizes=st.fixed_dictionaries(
        {"tokens": st.integers(0, 45), "batch": st.integers(0, 45), "windows": st.integers(0, 60)}
    ),
)
def test_derived_sizes_bound_a_call_and_do_not_multiply_the_grid(
    tokens: list[int], batch: list[int], factor: int, sizes: dict[str, int]
) -> None:
    grid = BucketGrid(
        tokens=tokens, batch=batch, derived={"windows": lambda b: b["tokens"] // factor + b["batch"]}
    )
    assert len(grid) == len(tokens) * len(batch)
    assert grid.choose(sizes) == brute_force(grid, sizes)


@given(tokens=size_lists, batch=size_lists, seqlen=size_lists)
def test_kept_buckets_are_reached_by_some_call_and_dropped_ones_by_none(
    tokens: list[int], batch: list[int], seqlen: list[int]
) -> None:
    grid = BucketGrid(tokens=tokens, batch=batch, seqlen=seqlen)
    assert len(grid) + len(grid.dropped) == len(tokens) * len(batch) * len(seqlen)
    for bucket in grid:
        fullest = {**bucket, "seqlen": min(bucket["seqlen"], bucket["tokens"])}
        assert grid.choose(fullest) == bucket
    for gone in grid.dropped:
        # Every call that the dropped point holds, at its fullest, has a bucket no larger in any size.
        fullest = {**gone.bucket, "seqlen": min(gone.bucket["seqlen"], gone.bucket["tokens"])}
        instead = grid.choose(fullest)
        assert instead is not None
        assert all(instead[name] <= gone.bucket[name] for name in grid.names)
        assert "no call can reach it" in gone.reason


def test_a_sequence_longer_than_all_tokens_gets_no_bucket_of_its_own() -> None:
    grid = BucketGrid(tokens=(1024, 4096, 16384), batch=(8, 16, 32, 64), seqlen=(1024, 4096))
    assert {(d.bucket["tokens"], d.bucket["seqlen"]) for d in grid.dropped} == {(1024, 4096)}
    assert len(grid) == 20
    # The maximum that a caller names may be more than the rows that he has.
    assert grid.choose({"tokens": 900, "batch": 3, "seqlen": 4096}) == Bucket(tokens=1024, batch=8, seqlen=1024)


def test_within_can_be_named_for_other_sizes_or_switched_off() -> None:
    named = BucketGrid(patches=(16, 64), longest=(16, 64), within={"longest": "patches"})
    assert [d.bucket for d in named.dropped] == [Bucket(patches=16, longest=64)]
    assert len(BucketGrid(tokens=(16, 64), seqlen=(16, 64), within={})) == 4


def test_beyond_the_grid_there_is_no_bucket_and_a_reason() -> None:
    grid = BucketGrid(tokens=(8, 16), batch=(2,))
    assert grid.choose({"tokens": 17, "batch": 1}) is None
    assert "tokens=17 is beyond the largest, 16" in grid.why_none({"tokens": 17, "batch": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BucketGrid(), "at least one named size list"),
        (
            lambda: BucketGrid(tokens=(8,), derived={"tokens": lambda b: 1}),
            "both a size list and a derived size",
        ),
        (lambda: BucketGrid(tokens=(8,), derived={"w": lambda b: 1.5}), "derived size 'w'"),
        (lambda: BucketGrid(tokens=(8,), derived={"w": lambda b: -1}), "at least 0"),
        (lambda: BucketGrid(tokens=(8,), keep=lambda b: False), "no bucket is left"),
        (lambda: BucketGrid(tokens=(8,), within={"x": "tokens"}), "within names 'x'"),
        (lambda: BucketGrid(a=(8,), b=(8,), c=(8,), within={"a": "b", "b": "c"}), "must not chain"),
        (lambda: BucketGrid(tokens=(8,)).choose({"tokens": -1}), "zero or more"),
        (lambda: BucketGrid(tokens=(8,)).choose({"rows": 1}), "missing"),
    ],
)
def test_grids_that_cannot_be_are_errors(make: object, message: str) -> None:
    with pytest.raises(BucketError, match=message):
        make()  # type: ignore[operator]


def test_buckets_are_frozen_hashable_and_picklable() -> None:
    bucket = Bucket(tokens=8, batch=2)
    assert bucket == Bucket({"batch": 2, "tokens": 8})
    assert hash(bucket) == hash(Bucket({"batch": 2, "tokens": 8}))
    assert pickle.loads(pickle.dumps(bucket)) == bucket
    with pytest.raises(AttributeError, match="frozen"):
        bucket.tokens = 3  # type: ignore[attr-defined]
    with pytest.raises(BucketError):
        Bucket(tokens=-1)
