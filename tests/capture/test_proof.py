"""Invariant: garbage in the padding that reaches a real row is found, and its first operation named; nothing else."""

import contextlib
import inspect
import math
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mmgraph.capture import CaptureError, PaddingLeakError
from mmgraph.capture.garbage import KINDS, garbage
from mmgraph.capture.leak_trace import Pattern, RealRegion, _Digest, _trace, as_bits, first_leak
from mmgraph.capture.proof import PaddedInput, Proof, prove

REAL, BUCKET, WIDTH = 5, 8, 6


def encode(value: Any, dtype: torch.dtype) -> Pattern:
    low, high = torch.full((16 // dtype.itemsize,), value, dtype=dtype).view(torch.int64).tolist()
    return low, high


@dataclass
class Leaf:
    """Real rows along axis 0, one for `per` of `dim`; `dim` None is a static input."""

    value: torch.Tensor
    dim: str | None = "tokens"
    per: int = 1
    fill: Any = 0
    relied_on: bool = False


class StandIn:
    """What a graph does, in plain torch: static inputs, padding from patterns, real rows out."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: dict[str, Leaf],
        outputs: Sequence[tuple[str, int] | None],
        real: dict[str, int],
        bucket: dict[str, int],
    ) -> None:
        self.fn, self.leaves, self.outputs, self.real, self.bucket = fn, inputs, outputs, real, bucket
        self.padded = {name: leaf for name, leaf in inputs.items() if leaf.dim is not None}
        self.static = {
            name: leaf.value.new_zeros((bucket[leaf.dim] // leaf.per, *leaf.value.shape[1:]))
            for name, leaf in self.padded.items()
            if leaf.dim is not None
        }
        self.replays = 0

    def stage(self, fills: Sequence[Pattern]) -> dict[str, torch.Tensor]:
        for (name, leaf), pattern in zip(self.padded.items(), fills, strict=True):
            self.static[name][: len(leaf.value)] = leaf.value
            word = torch.tensor(pattern, dtype=torch.int64).view(leaf.value.dtype)[0]
            self.static[name][len(leaf.value) :] = word
        return {name: self.static.get(name, leaf.value) for name, leaf in self.leaves.items()}

    def run(self, fills: Sequence[Pattern], mode: contextlib.AbstractContextManager[Any]) -> Sequence[Any]:
        staged = self.stage(fills)
        with torch.no_grad(), mode:
            return pytree.tree_leaves(self.fn(**staged))

    def replay(self, fills: Sequence[Pattern]) -> list[torch.Tensor | None]:
        self.replays += 1
        found = self.run(fills, contextlib.nullcontext())
        return [
            out.clone() if spec is None else out[: self.real[spec[0]] // spec[1]].clone()
            for out, spec in zip(found, self.outputs, strict=True)
        ]

    def prove(self, **options: Any) -> Proof:
        entries = [
            PaddedInput(name, leaf.value.dtype, leaf.fill, leaf.value, leaf.relied_on)
            for name, leaf in self.padded.items()
        ]
        paths = [f"output[{position}]" for position in range(len(self.outputs))]
        options = {"run": self.run, "per": {"tokens": (2,)}, **options}
        return prove(self.replay, entries, paths, encode, real=self.real, bucket=self.bucket, **options)


def stand_in(fn: Callable[..., Any], *more: tuple[str, int] | None, **inputs: Leaf) -> StandIn:
    generator = torch.Generator().manual_seed(0)
    leaves = {"x": Leaf(torch.randn(REAL, WIDTH, generator=generator)), **inputs}
    return StandIn(fn, leaves, more or [("tokens", 1)], {"tokens": REAL}, {"tokens": BUCKET})


def leak_of(fn: Callable[..., Any], *more: tuple[str, int] | None, **inputs: Leaf) -> PaddingLeakError:
    with pytest.raises(PaddingLeakError) as caught:
        stand_in(fn, *more, **inputs).prove()
    return caught.value


def marked_line(fn: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(fn)
    offset = next(number for number, line in enumerate(lines) if line.rstrip().endswith("# leak"))
    return f"(in {fn.__name__}, test_proof.py:{first + offset})"


def mean_over_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    shift = y.mean(0)  # leak
    return y - shift


def softmax_over_all_keys(x: torch.Tensor) -> torch.Tensor:
    scores = x @ x.T
    weights = scores.softmax(-1)  # leak
    return weights @ x


def suffix_sums(x: torch.Tensor) -> torch.Tensor:
    turned = x.flip(0)  # leak
    return turned.cumsum(0).flip(0)


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    return F.batch_norm(y, None, None, training=True)  # leak


def sort_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0, descending=True).values  # leak


def topk_rows(x: torch.Tensor) -> torch.Tensor:
    best = x[:, 0].topk(3).values  # leak
    return x + best.sum()


def gram(x: torch.Tensor) -> torch.Tensor:
    products = x.T @ x  # leak
    return x @ products


def largest_row(x: torch.Tensor) -> torch.Tensor:
    return x / x.amax(0)  # leak


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x + x.roll(1, 0)  # leak


def next_row(x: torch.Tensor) -> torch.Tensor:
    following = (torch.arange(len(x)) + 1).clamp(max=len(x) - 1)
    return x[following]  # leak


def suffix_in_place(x: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros_like(x)
    sums.index_add_(0, torch.arange(len(x)) // 3, x)  # leak
    return sums


def wrong_length(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, 2, WIDTH // 2).transpose(0, 1)
    mask = torch.arange(len(x)) < REAL + 1
    mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[None, :])  # leak
    return mixed.transpose(0, 1).reshape(-1, WIDTH)


def merged_then_mixed(x: torch.Tensor) -> torch.Tensor:
    merged = x.view(len(x) // 2, 2 * WIDTH)
    heads = merged.view(-1, 3, 4).reshape(-1, 4).relu()
    norm = heads.pow(2).sum()  # leak
    return merged * norm


@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (mean_over_rows, "aten.mean.dim"),
        (softmax_over_all_keys, "aten._softmax.default"),
        (suffix_sums, "aten.flip.default"),
        (batch_norm, r"aten\.\w*native_batch_norm\w*\.\w+"),
        (sort_rows, "aten.sort.default"),
        (topk_rows, "aten.topk.default"),
        (gram, "aten.mm.default"),
        (largest_row, "aten.amax.default"),
        (rolled, "aten.roll.default"),
        (next_row, "aten.index.Tensor"),
        (suffix_in_place, "aten.index_add_.default"),
        (wrong_length, r"aten\.\w*(softmax|scaled_dot_product)\w*\.default"),
    ],
)
def test_a_leak_is_named_with_its_line(fn: Callable[..., Any], operation: str) -> None:
    leak = leak_of(fn)
    assert re.fullmatch(f"{operation} {re.escape(marked_line(fn))}", leak.operation or "")
    assert (leak.output, leak.kind, leak.inputs) == ("output[0]", "nan", ("x",))
    assert leak.operation in str(leak)
    assert isinstance(leak, CaptureError)


def test_rows_merged_and_split_into_heads_are_still_told_from_padding() -> None:
    leak = leak_of(merged_then_mixed, ("tokens", 2))
    assert leak.operation == f"aten.sum.default {marked_line(merged_then_mixed)}"


def windowed(x: torch.Tensor) -> torch.Tensor:
    windows = x.view(len(x) // 4, 4, WIDTH).relu()
    return windows.cumsum(2).reshape(-1, WIDTH) - windows.mean(1).sum(0)  # leak


def test_rows_split_into_windows_are_still_told_from_padding() -> None:
    assert leak_of(windowed).operation == f"aten.mean.dim {marked_line(windowed)}"


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Softmax(0))(x)  # leak


def test_the_line_is_the_users_and_not_one_inside_torch() -> None:
    block = Block()
    leak = leak_of(lambda x: block(x))
    assert leak.operation == f"aten._softmax.default {marked_line(Block.forward)}"


def valid(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(x)) < REAL)[:, None]


def masked_by_zero(x: torch.Tensor) -> torch.Tensor:
    kept = x * valid(x)
    return kept.sum(0)  # leak


def squares_masked_by_zero(x: torch.Tensor) -> torch.Tensor:
    kept = x.nan_to_num().square() * valid(x)
    return kept.sum(0)  # leak


def kept_by_threshold(x: torch.Tensor) -> torch.Tensor:
    kept = torch.where(x.abs().amax(1, keepdim=True) < 100, x, 0)
    return kept.sum(0)  # leak


@pytest.mark.parametrize(
    ("fn", "kind"),
    [(masked_by_zero, "nan"), (squares_masked_by_zero, "large"), (kept_by_threshold, "moderate")],
)
def test_each_kind_of_garbage_finds_what_the_others_do_not(fn: Callable[..., Any], kind: str) -> None:
    leak = leak_of(fn, None)
    assert leak.kind == kind
    assert leak.operation == f"aten.sum.dim_IntList {marked_line(fn)}"
    graph = stand_in(fn, None)
    clean = graph.replay([(0, 0)])[0]
    for other in KINDS:
        value = garbage(other, torch.float32, 0, graph.leaves["x"].value)
        same = torch.equal(as_bits(graph.replay([encode(value, torch.float32)])[0]), as_bits(clean))
        assert same == (other != kind)


def counted(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(4, dtype=torch.int64)
    counts.index_add_(0, ids, torch.ones_like(ids))  # leak
    return x * counts[ids][:, None]


def test_integer_padding_is_varied_within_the_real_values() -> None:
    leak = leak_of(counted, ids=Leaf(torch.tensor([3, 1, 2, 1, 2])))
    assert leak.operation == f"aten.index_add_.default {marked_line(counted)}"
    assert leak.inputs == ("ids",)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x - torch.where(mask[:, None], x, 0).sum(0) / mask.sum()  # leak


def test_an_input_that_padding_is_told_by_keeps_its_fill() -> None:
    mask = torch.ones(REAL, dtype=torch.bool)
    assert leak_of(masked_mean, mask=Leaf(mask)).inputs == ("mask",)
    proof = stand_in(masked_mean, mask=Leaf(mask, relied_on=True)).prove()
    assert proof == Proof(kinds=KINDS, exact=("output[0]",))


def sums_with_a_bin_for_padding(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bins = torch.where(torch.arange(len(x)) < REAL, 0, 1)
    sums = torch.zeros(2, WIDTH).index_add_(0, bins, x)
    total = x.sum()  # leak
    return x + sums[0], x + total


def test_differences_that_no_real_row_sees_are_not_blamed() -> None:
    leak = leak_of(sums_with_a_bin_for_padding, ("tokens", 1), ("tokens", 1))
    assert leak.output == "output[1]"
    assert leak.operation == f"aten.sum.default {marked_line(sums_with_a_bin_for_padding)}"


def two_leaks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.sum()
    shift = x.mean(0)  # leak
    return x + shift, x + total


def test_the_operation_is_one_that_the_named_output_comes_from() -> None:
    leak = leak_of(two_leaks, ("tokens", 1), ("tokens", 1))
    assert leak.operation == f"aten.mean.dim {marked_line(two_leaks)}"


def into_unset_memory(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    shift = x.amax(0)  # leak
    return torch.sub(x, shift, out=out)


def test_values_that_unset_memory_happens_to_hold_are_not_compared() -> None:
    assert leak_of(into_unset_memory).operation == f"aten.amax.default {marked_line(into_unset_memory)}"
    graph = stand_in(into_unset_memory)
    trace = _trace(graph.run, [(0, 0)], RealRegion(graph.real, graph.bucket), _Digest())
    assert dict(zip(trace.names, trace.digests, strict=True))["aten.empty_like.default"] == []


def scaled_at_random(x: torch.Tensor) -> torch.Tensor:
    scaled = x * torch.rand(())
    shift = x.mean(0)  # leak
    return scaled + shift


def test_operations_that_differ_by_themselves_are_not_blamed() -> None:
    graph = stand_in(scaled_at_random)
    nan = [encode(float("nan"), torch.float32)]
    named = first_leak(graph.run, [(0, 0)], nan, graph.real, graph.bucket)
    assert named == f"aten.mean.dim {marked_line(scaled_at_random)}"


def test_nan_in_real_rows_is_a_value_like_others() -> None:
    assert stand_in(lambda x: x * float("nan")).prove().exact == ("output[0]",)


@torch.library.custom_op("mmgraph_test_proof::shift", mutates_args={"x"})
def shift(x: torch.Tensor) -> None:
    x.copy_(x.roll(1, 0))


def with_custom_op(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    shift(y)  # leak
    return y


def compiled_mean(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)  # leak


def test_custom_operations_that_write_in_place_and_compiled_functions_are_named() -> None:
    leak = leak_of(with_custom_op)
    assert leak.operation == f"mmgraph_test_proof.shift.default {marked_line(with_custom_op)}"
    leak = leak_of(torch.compile(compiled_mean, backend="aot_eager", fullgraph=True))
    assert leak.operation == f"aten.mean.dim {marked_line(compiled_mean)}"


def test_without_a_trace_the_output_is_still_named() -> None:
    def fails_when_traced(x: torch.Tensor) -> torch.Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("There was no rule registered for HigherOrderOperator cond")
        return x - x.mean(0)

    leak = leak_of(fails_when_traced)
    assert (leak.output, leak.operation) == ("output[0]", None)
    with pytest.raises(PaddingLeakError, match=r"real rows of output\[0\].*not traced"):
        stand_in(mean_over_rows).prove(run=None)


def test_a_leak_of_the_captured_form_alone_names_no_operation() -> None:
    graph = stand_in(lambda x: x * 2)
    replay = graph.replay
    graph.replay = lambda fills: [replay(fills)[0] + graph.static["x"].sum()]  # type: ignore[method-assign]
    with pytest.raises(PaddingLeakError, match="only the captured form") as caught:
        graph.prove()
    assert caught.value.operation is None


def test_random_numbers_and_state_are_put_back_before_every_replay() -> None:
    state = torch.zeros(())

    def noisy(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return F.dropout(x, 0.5) + state

    def begin() -> None:
        state.zero_()
        torch.manual_seed(0)

    assert stand_in(noisy).prove(begin=begin).exact == ("output[0]",)

    def noisy_and_mixed(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return F.dropout(x, 0.5).sum() * x + state  # leak

    with pytest.raises(PaddingLeakError) as caught:
        stand_in(noisy_and_mixed).prove(begin=begin)
    assert caught.value.operation == f"aten.sum.default {marked_line(noisy_and_mixed)}"


@pytest.mark.parametrize("quiet", [0, 3])
def test_outputs_that_differ_by_themselves_get_a_tolerance(quiet: int) -> None:
    def atomic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if graph.replays <= quiet:  # luck
            return x * 2, x * 0
        jitter = 1e-6 * (graph.replays % 3 + 1)
        return x * 2 + jitter, x * 0 + jitter

    graph = stand_in(atomic, ("tokens", 1), ("tokens", 1))
    proof = graph.prove()
    assert proof.exact == ()
    assert set(proof.within) == {"output[0]", "output[1]"}
    assert all(1e-6 < allowed < 1e-4 for allowed in proof.within.values())

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return atomic(x)[0] + x.nan_to_num(posinf=0).clamp(-9, 9).mean(0)

    graph = stand_in(mixed)
    with pytest.raises(PaddingLeakError) as caught:
        graph.prove(run=None)
    assert caught.value.kind == "large"


def test_what_cannot_be_proved_is_said() -> None:
    def counter(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.full((BUCKET,), graph.replays)

    graph = stand_in(counter, ids=Leaf(torch.zeros(REAL, dtype=torch.int32)))
    proof = graph.prove()
    assert proof == Proof(kinds=KINDS, unproved=("output[0]",), unvaried=("ids",))


def test_nothing_that_the_function_makes_is_kept_alive() -> None:
    alive = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen = weakref.ref(y.untyped_storage())
        z = y + x.mean(0)
        del y
        alive.append(seen() is not None)
        return z

    graph = stand_in(watched)
    nan = [encode(float("nan"), torch.float32)]
    named = first_leak(graph.run, [(0, 0)], nan, graph.real, graph.bucket)
    assert str(named).startswith("aten.mean.dim")
    assert alive == [False] * 4


FLOATS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
]
WHOLE = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_garbage_of_floats_is_what_it_says_in_every_dtype(dtype: torch.dtype) -> None:
    sample = torch.tensor([0.5, 2.0, 1.0]).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    nan, large, moderate = (
        torch.full((1,), garbage(kind, dtype, 0, sample), dtype=dtype).to(wide) for kind in KINDS
    )
    assert nan.isnan().all()
    assert large.isfinite().all()
    assert large.abs() ** 2 > torch.finfo(dtype).max
    assert 0 < moderate.abs() < 3
    filled = garbage("moderate", dtype, garbage("moderate", dtype, 0, sample).real, sample)
    assert torch.full((1,), filled, dtype=dtype).to(wide) != moderate


@pytest.mark.parametrize("dtype", WHOLE)
def test_garbage_of_integers_is_a_real_value_other_than_the_fill(dtype: torch.dtype) -> None:
    top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    sample = torch.full((4,), top, dtype=dtype)
    sample[0] = 0
    for kind in KINDS:
        assert garbage(kind, dtype, 0, sample) == top
        assert garbage(kind, dtype, top, sample) == 0
        assert garbage(kind, dtype, top, sample[1:]) is None
        assert garbage(kind, dtype, top, sample[:0]) is None


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([*FLOATS, *WHOLE]),
    size=st.integers(2, 40),
    strided=st.booleans(),
    seed=st.integers(0, 2**20),
    changes=st.integers(1, 4),
)
def test_digests_tell_any_change_of_bits(
    dtype: torch.dtype, size: int, strided: bool, seed: int, changes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size_bytes = size * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size_bytes,), dtype=torch.uint8, generator=generator)
    other = raw.clone()
    flip = 1 if dtype == torch.bool else 128  # the highest bits, where sums lose most
    places = torch.randperm(size, generator=generator)[:changes] * dtype.itemsize + dtype.itemsize - 1
    other[places] ^= flip
    step = slice(None, None, 2) if strided else slice(None)
    one, two = raw.view(dtype)[step], other.view(dtype)[step]
    digest = _Digest()
    same = torch.equal(raw.view(-1, dtype.itemsize)[step], other.view(-1, dtype.itemsize)[step])
    assert (digest(one).item() == digest(two).item()) == same
    assert digest(one).item() == digest(one.clone()).item()


def test_digests_tell_large_tensors_and_swapped_elements() -> None:
    digest = _Digest()
    numbers = torch.arange((1 << 20) + 3, dtype=torch.int32)
    swapped = numbers.clone()
    swapped[[1, (1 << 20) + 1]] = numbers[[(1 << 20) + 1, 1]]
    assert digest(numbers).item() != digest(swapped).item()


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((16, 7), [(11, 7)]),
        ((3, 16, 16), [(3, 11, 11)]),
        ((17,), [(12,)]),
        ((2, 8, 7), [(11, 7), (2, 4, 7), (2, 2, 2, 7)]),
        ((7, 2, 2, 4), [(7, 2, 2, 2), (7, 2, 4), (7, 11)]),  # a row for each 4, or windows of two kinds
        ((48, 7), [(33, 7), (3, 11, 7), (24, 7), (12, 2, 7)]),
        ((9, 7), [(2, 7)]),
        ((3, 7), [(3, 7)]),
        ((1, 7), [(1, 7)]),
        ((), [()]),
    ],
)
def test_the_real_region_is_told_by_shape(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    sizes = {"tokens": 16, "images": 9, "full": 7, "fewer": 9}
    region = RealRegion({"tokens": 11, "images": 2, "full": 7, "fewer": 3}, sizes, {"tokens": (4, 16)})
    tensor = torch.arange(math.prod(shape)).view(shape)
    found = region.of(tensor)
    assert [tuple(part.shape) for part in found] == parts
    assert all(part.min() == 0 for part in found)


def test_a_part_without_rows_does_not_excuse_another() -> None:
    region = RealRegion({"tokens": 11, "images": 0}, {"tokens": 16, "images": 9})
    assert [part.shape for part in region.of(torch.zeros(18, 16))] == [(18, 11)]
    assert [part.shape for part in region.of(torch.zeros(9, 7))] == [(0, 7)]


def segment_means(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Means over segments from running sums; padding rows are zeroed by where, padding segments are empty."""
    inside = torch.arange(len(x)) < offsets[-1]
    sums = F.pad(torch.where(inside[:, None], x, 0).cumsum(0), (0, 0, 1, 0))
    lengths = offsets.diff()[:, None]
    return (sums[offsets[1:]] - sums[offsets[:-1]]) / lengths.clamp(min=1)


ROW_WISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "project": lambda x: x @ torch.linspace(-1, 1, x.shape[-1] ** 2, dtype=x.dtype).view(x.shape[-1], -1),
    "softmax": lambda x: x.softmax(-1),
    "square": lambda x: x * x,
    "prefix": lambda x: x.cumsum(0),
    "in_place": lambda x: x.clone().mul_(3),
    "heads": lambda x: x.view(len(x), 2, -1).flip(1).reshape(len(x), -1),
}


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    room=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    width=st.sampled_from([2, 4, 6]),
    chain=st.lists(st.sampled_from(sorted(ROW_WISE)), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    mix=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_row_wise_chains_and_masked_segments_pass_and_a_mean_in_them_does_not(
    lengths: list[int],
    room: tuple[int, int],
    width: int,
    chain: list[str],
    dtype: torch.dtype,
    mix: bool,
    seed: int,
) -> None:
    def fn(x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for name in chain:
            x = ROW_WISE[name](x)
        merged = x.view(len(x) // 2, 2 * width)
        if mix:
            x = x + x.mean()  # leak
        return x, merged, segment_means(x, offsets)

    total = sum(lengths)
    real = {"tokens": total - total % 2, "images": len(lengths)}
    bucket = {"tokens": max(2, real["tokens"] + 2 * room[0]), "images": real["images"] + room[1]}
    ends = torch.tensor(lengths).cumsum(0).clamp(max=real["tokens"]).tolist()
    offsets = torch.tensor([0, *ends, *[ends[-1]] * room[1]])
    x = torch.randn(real["tokens"], width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    leaves = {"x": Leaf(x), "offsets": Leaf(offsets, dim=None)}
    outputs = [("tokens", 1), ("tokens", 2), ("images", 1)]
    graph = StandIn(fn, leaves, outputs, real, bucket)
    if mix and 0 < real["tokens"] < bucket["tokens"]:
        with pytest.raises(PaddingLeakError) as caught:
            graph.prove()
        assert caught.value.output == "output[0]"
        assert caught.value.operation == f"aten.mean.default {marked_line(fn)}"
    else:
        assert graph.prove().exact == ("output[0]", "output[1]", "output[2]")
