"""Invariant: what does not fit is an error that names it, before anything runs, and a good call follows."""

from typing import Any

import numpy as np
import pytest
import torch
from segments import assert_same, make_call, segment_means

from mmgraph.capture import (
    BucketGrid,
    CallError,
    CallGradientError,
    CaptureFailedError,
    CaptureManager,
    OutputError,
    SpecError,
    bucket_size,
    constant,
    offsets,
    rows,
    static,
)


def test_a_changed_constant_is_a_miss_with_the_right_result(graphs: CaptureManager) -> None:
    call = {**make_call([2, 2], 0, seed=7), "longest": 8}
    assert "constant changed: longest" in graphs.explain_call(**call).reason
    assert_same(graphs(**call), segment_means(**call))


GOOD = make_call([2, 2], 0, seed=8)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"x": GOOD["x"].float()}, "x must be torch.float64, got torch.float32"),
    "width": ({"x": GOOD["x"][:, :2]}, r"x must have shape \[tokens, 3\], got \[4, 2\]"),
    "rank": ({"x": GOOD["x"][None]}, r"x must have shape \[tokens, 3\]"),
    "scalar": ({"x": torch.zeros((), dtype=torch.float64)}, "x must have rows along axis 0"),
    "not a tensor": ({"x": [1.0]}, "x must be a tensor, got list"),
    "device": ({"x": GOOD["x"].to("meta")}, "x must be on cpu, got meta"),
    "offset dtype": ({"cu": GOOD["cu"].long()}, "cu must be torch.int32, got torch.int64"),
    "offset rank": ({"cu": GOOD["cu"][None]}, r"cu must have shape \[batch \+ 1\]"),
    "no offsets": ({"cu": GOOD["cu"][:0]}, r"cu must have shape \[batch \+ 1\]"),
    "static shape": ({"weight": GOOD["weight"][:2]}, r"weight must have shape \[3, 3\] in every call"),
    "not divisible": ({"x": GOOD["x"][:3]}, "tokens=3 is not a multiple of 2"),
    "unknown": ({"y": 1}, r"unknown \['y'\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_a_good_call_follows(graphs: CaptureManager, name: str) -> None:
    change, message = WRONG[name]
    calls = graphs.report().calls
    with pytest.raises(CallError, match=message):
        graphs(**{**GOOD, **change})
    assert graphs.report().calls == calls
    assert_same(graphs(**GOOD), segment_means(**GOOD))


def test_missing_and_repeated_arguments_are_named(graphs: CaptureManager) -> None:
    with pytest.raises(CallError, match=r"missing \['cu'\]"):
        graphs(**{name: value for name, value in GOOD.items() if name != "cu"})
    with pytest.raises(CallError, match="'x' is given both"):
        graphs(GOOD["x"], **GOOD)
    with pytest.raises(CallError, match="at most 4"):
        graphs(1, 2, 3, 4, 5)


def test_an_input_that_needs_a_gradient_is_refused_with_a_hint(graphs: CaptureManager) -> None:
    call = {**GOOD, "x": GOOD["x"].clone().requires_grad_()}
    with pytest.raises(CallGradientError, match="detach"):
        graphs(**call)
    with torch.no_grad():
        assert_same(graphs(**call), segment_means(**call))


def test_sizes_that_disagree_are_an_error_that_names_both() -> None:
    manager = CaptureManager(
        lambda a, b: a + b.sum(),
        inputs={"a": rows("tokens"), "b": rows("tokens", per=2)},
        outputs=rows("tokens"),
        buckets=BucketGrid(tokens=(8,)),
    )
    manager.precompile({"a": torch.zeros(4), "b": torch.zeros(2)}, progress=False)
    with pytest.raises(CallError, match="b gives tokens=6, but a gives tokens=4"):
        manager(a=torch.zeros(4), b=torch.zeros(3))
    assert manager(a=torch.zeros(4), b=torch.ones(2)).tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (lambda x: x[:1], rows("n"), "must have 8 rows along axis 0"),
        (lambda x: (x, x), rows("n"), r"must be a tensor, got tuple: declare outputs with the structure"),
        (lambda x: (x, [x + 1]), (rows("n"), constant()), "is a tensor or holds one"),
        (lambda x: (x, None if x.shape[0] == 8 else x), (rows("n"), None), "declared as None"),
        (lambda x: x, (rows("n"), rows("n")), "does not have the declared structure"),
        (lambda x: x, None, "declared as None"),
        (lambda x: 3, rows("n"), r"declare constant\(\)"),
        (lambda x: x, constant(), "declared constant but is a tensor"),
        (
            lambda x: x.float() if x.shape[0] == 8 else x,
            rows("n"),
            r"torch.float32 \[4, 2\], got torch.float64",
        ),
        (lambda x: x[:, :1] if x.shape[0] == 8 else x, rows("n"), r"\[4, 1\], got"),
    ],
)
def test_outputs_other_than_declared_are_named(function: Any, outputs: Any, message: str) -> None:
    manager = CaptureManager(function, inputs={"x": rows("n")}, outputs=outputs, buckets=BucketGrid(n=(4, 8)))
    with pytest.raises(CaptureFailedError, match=message) as caught:
        manager.precompile({"x": torch.zeros(3, 2, dtype=torch.float64)}, progress=False)
    assert isinstance(caught.value.__cause__, OutputError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {}}, "must map argument names"),
        ({"inputs": {"x": 3}}, "input x must be a spec"),
        ({"inputs": {"x": rows("m")}}, "names the size 'm'"),
        ({"inputs": {"x": [rows("n"), offsets("n", of="z")]}}, r"x\[1\] names the size 'z'"),
        ({"outputs": rows("m")}, "output names the size 'm'"),
        ({"outputs": bucket_size("n")}, "output must be rows"),
        ({"outputs": rows("n", per=3)}, "does not divide Bucket"),
        ({"inputs": {"x": static()}}, "no input gives the size 'n'"),
        ({"buckets": (4, 8)}, "must be a BucketGrid"),
        ({"warmup": 1}, "at least 2"),
        ({"inputs": {"y": rows("n")}}, "has no parameter 'y'"),
        ({"inputs": {"x": rows("n"), "y": bucket_size("n")}}, "has no parameter 'y'"),
        ({"fn": 3}, "fn must be callable"),
    ],
)
def test_declarations_that_do_not_fit_are_errors_at_construction(
    arguments: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {
        "fn": lambda x: x,
        "inputs": {"x": rows("n")},
        "outputs": rows("n"),
        "buckets": BucketGrid(n=(4, 8)),
    }
    fn = arguments.pop("fn", good.pop("fn"))
    with pytest.raises(SpecError, match=message):
        CaptureManager(fn, **{**good, **arguments})


@pytest.mark.parametrize(
    "make", [lambda: rows("n", per=0), lambda: rows("n", axis=-1), lambda: rows(""), lambda: offsets(3, of="n")]
)  # type: ignore[arg-type]
def test_specs_that_cannot_be_are_errors(make: Any) -> None:
    with pytest.raises(SpecError):
        make()


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.int8, 300),
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.int32, float("nan")),
        (torch.float16, 1e10),
        (torch.bool, 2),
    ],
)
def test_a_fill_that_the_dtype_cannot_hold_is_an_error_before_anything_runs(
    dtype: torch.dtype, fill: float
) -> None:
    manager = CaptureManager(
        lambda x: x, inputs={"x": rows("n", fill=fill)}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    with pytest.raises(SpecError, match="cannot hold the fill"):
        manager.precompile({"x": torch.zeros(3, dtype=dtype)}, progress=False)
    with pytest.raises(SpecError, match="fill must be a number"):
        rows("n", fill="x")  # type: ignore[arg-type]


def test_a_size_that_tensors_have_is_never_taken_for_less_than_it_is() -> None:
    grid = BucketGrid(tokens=(8, 16), seqlen=(8, 16))
    manager = CaptureManager(
        lambda x, p: (x * 2, p * 2),
        inputs={"x": rows("tokens"), "p": rows("seqlen")},
        outputs=(rows("tokens"), rows("seqlen")),
        buckets=grid,
    )
    manager.precompile({"x": torch.zeros(4), "p": torch.zeros(4)}, progress=False)
    assert len(manager.report().buckets) == 4
    _, p = manager(x=torch.ones(4), p=torch.ones(12))
    assert p.tolist() == [2.0] * 12
    with pytest.raises(SpecError, match="'seqlen' lies within 'tokens'"):
        CaptureManager(
            lambda x, p: x,
            inputs={"x": rows("tokens"), "p": rows("seqlen")},
            outputs=rows("tokens"),
            buckets=BucketGrid(tokens=(8, 16), seqlen=(8, 16), within={"seqlen": "tokens"}),
        )


SAME: dict[str, tuple[Any, Any, bool]] = {
    "equal numbers": (2, 2, True),
    "another number": (2, 3, False),
    "bool for int": (True, 1, False),
    "bool for int inside": ((True,), (1,), False),
    "sign of zero": (0.0, -0.0, False),
    "nan": (float("nan"), float("nan"), True),
    "array": (np.arange(3), np.arange(3), True),
    "another array": (np.arange(3), np.arange(3) + 1, False),
    "dictionary": ({"a": [1, 2]}, {"a": [1, 2]}, True),
    "string": ("a", "b", False),
    "another tensor": (torch.ones(1), torch.ones(1), False),
}


@pytest.mark.parametrize("name", SAME)
def test_constants_hit_only_where_they_are_what_they_were(name: str) -> None:
    captured, given, hit = SAME[name]
    manager = CaptureManager(
        lambda x, c: x * 1,
        inputs={"x": rows("n"), "c": constant()},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    manager.precompile({"x": torch.zeros(3), "c": captured}, progress=False)
    assert manager.explain_call(x=torch.zeros(3), c=captured).hit
    assert manager.explain_call(x=torch.zeros(3), c=given).hit is hit


def test_a_constant_changed_in_place_is_another_value() -> None:
    manager = CaptureManager(
        lambda x, c: x * c[0],
        inputs={"x": rows("n"), "c": constant()},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    c = [2.0]
    manager.precompile({"x": torch.zeros(3), "c": c}, progress=False)
    assert manager(x=torch.ones(2), c=c).tolist() == [2.0] * 2
    c[0] = 5.0
    assert manager(x=torch.ones(2), c=c).tolist() == [5.0] * 2
    assert manager.report().misses == {"constant changed": 1}


def test_an_example_that_does_not_fit_is_an_error_and_harms_nothing() -> None:
    manager = CaptureManager(
        lambda x, c: x * c,
        inputs={"x": rows("n", dtype=torch.float32, shape=(2,)), "c": constant()},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    manager.precompile({"x": torch.zeros(3, 2), "c": 2}, progress=False)
    for bad in (torch.zeros(3, 2).double(), torch.zeros(3, 5), torch.zeros(()), "x"):
        with pytest.raises(CallError, match="x must"):
            manager.precompile({"x": bad, "c": 2}, progress=False)
        assert manager(x=torch.ones(3, 2), c=2).sum() == 12
    assert manager.report().misses == {}
