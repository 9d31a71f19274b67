"""What the scripts that run kernels under Triton's interpreter share: offsets, limits, memory that shows strays."""

import itertools
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from mmgraph import ops
from mmgraph.ops.attention import reference


def allow_new_numpy():
    """Triton 3.6's interpreter takes ``int()`` of one-element arrays, which numpy 2.4 refuses; newer ones don't."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_mend


def patch_once():
    """Give kernels the interpreter's triton.language for good, where they would get it anew again and again.

    The interpreter lists all that the language holds, for what to replace, at each launch and at each call of a helper
    in a kernel, which took more than half of these scripts' time; and a launch puts back what it replaced.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched = set()

    def patch_what_is_new(fn):
        seen = frozenset(of.__name__ for of in fn.__globals__.values() if of is tl or of is tl.core)
        if seen not in patched:
            patch(fn)
            patched.add(seen)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._patch_lang = patch_what_is_new


def round_to_nearest():
    """The interpreter cuts float32 to bfloat16, and takes float64 for an integer there; devices round."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar not in (tl.float32, tl.float64):
            return plain(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded.reshape(src.data.shape), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def expect(words, call):
    call()
    with pytest.raises(ops.DeviceError, match=words):
        ops.check_errors()
    ops.check_errors()


def recorded():
    """Whether wrong offsets were recorded; they aren't any more afterwards."""
    try:
        ops.check_errors()
    except ops.DeviceError as error:
        return "cu_seqlens doesn't fit" in str(error)
    return False


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(generator, tokens, heads, kv_heads, width, v_width, dtype):
    """q, k and v as views of one projection, and the projection."""
    sizes = [heads * width, kv_heads * width, kv_heads * v_width]
    qkv = torch.randn(tokens, sum(sizes), generator=generator).to(dtype)
    parts = zip(qkv.split(sizes, 1), (width, width, v_width), strict=True)
    return *(x.unflatten(1, (-1, w)) for x, w in parts), qkv


def assert_near(got, q, k, v, cu, longest, scale, causal):
    """Off by at most twice the reference's own error against float64, plus eps times the largest value."""
    expected = reference.forward(q, k, v, cu, longest, scale, causal, False)[0]
    doubles = [x.double() for x in (q, k, v)]
    exact = reference.forward(*doubles, cu, longest, scale, causal, False)[0]
    covered = int(cu[-1])
    largest = float(v[:covered].abs().max()) if covered else 0.0
    steps = 8 if got.dtype == torch.float32 else 1
    limit = 2 * float((expected - exact).abs().max()) + steps * torch.finfo(got.dtype).eps * largest
    assert float((got - exact).abs().max()) <= limit


def guarded(made, values=7.0):
    """Room for a tensor with as much again, of nines, before and after it; and the tensor."""
    size = made.numel()
    room = torch.full((3 * size,), 9.0, dtype=made.dtype)
    inside = room[size : 2 * size].view(made.shape)
    inside.copy_(torch.as_tensor(values))
    return room, inside


def is_whole(room):
    size = room.shape[0] // 3
    return bool((room[:size] == 9).all() and (room[2 * size :] == 9).all())


@contextmanager
def guarded_outputs():
    """Outputs made by ``new_empty`` lie in rooms with guards; the rooms."""
    plain_empty = torch.Tensor.new_empty
    rooms = []

    def new_empty(tensor, shape, **keywords):
        if "device" in keywords:  # the interpreter's own
            return plain_empty(tensor, shape, **keywords)
        rooms.append(guarded(torch.empty(shape, dtype=keywords.get("dtype", tensor.dtype))))
        return rooms[-1][1]

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield rooms


def between_nans(values):
    """A copy of a tensor with as many rows of NaN before and after it: what lies there would show in a result."""
    rows = values.shape[0]
    room = torch.full((3 * rows, *values.shape[1:]), float("nan"), dtype=values.dtype)
    room[rows : 2 * rows] = values
    return room[rows : 2 * rows]


def doubtful_offsets(tokens, batch):
    """Offsets that a caller may hand in by mistake, and some that are right."""
    largest, least = 2**31 - 1, -(2**31)
    yield [0] * batch + [tokens]
    yield [tokens + 136 + 5 * i for i in range(batch + 1)]
    yield [10**6 + 5 * i for i in range(batch + 1)]
    yield [3 + 4 * i for i in range(batch + 1)]
    yield [20] * batch + [tokens]
    yield [tokens - i for i in range(batch + 1)]
    yield [-5 * i for i in range(batch + 1)]
    yield [-7, *range(batch)]
    for value in (largest, least, -1, tokens, tokens + 1):
        yield [value] * (batch + 1)
        for place in range(batch + 1):
            offsets = [tokens * i // batch for i in range(batch + 1)]
            offsets[place] = value
            yield offsets
    g = torch.Generator().manual_seed(0)
    for reach in (tokens, 2 * tokens, largest):
        for _ in range(4):
            yield torch.randint(-reach, reach, (batch + 1,), generator=g).tolist()
            yield torch.randint(0, reach, (batch + 1,), generator=g).sort().values.tolist()


def is_wrong(offsets, tokens, longest):
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    return offsets[0] != 0 or min(lengths) < 0 or offsets[-1] > tokens or max(lengths) > longest
