"""Invariant: a kept variant of a kernel is launched only for calls that Triton itself would have given that variant."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.ops import launching
from mmgraph.ops.errors import DuringCaptureError
from mmgraph.ops.launching import launch

EDGES = (0, 1, 2, 8, 15, 16, 17, 32, 72, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**33 + 8)


class Kernel:
    """Plays a kernel: it compiles a new variant at each call of its own, and notes every launch."""

    def __init__(self, interpreted=False, variant=None):
        self.interpreted = interpreted
        self.variant = variant or Variant
        self.compiled = []
        self.launched = []

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return None if self.interpreted else self.variant(self, len(self.compiled) - 1)

        return call


class Variant:
    """Plays a compiled variant of Triton 3.7 and newer; in 3.6 the launcher's names end with ``function``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, number):
        self.kernel = kernel
        self.number = number

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.kernel.launched.append((self.number, grid, arguments, stream))

    def run(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        assert (function, kernel_metadata) == ("function", "metadata")
        assert launch_metadata is launch_enter_hook is launch_exit_hook is None
        self.kernel.launched.append((self.number, (gridX, gridY, gridZ), args, stream))


class StrangeVariant(Variant):
    """Of a release whose launcher isn't known."""

    def run(self, grid, stream, *args):
        raise AssertionError


class Memory:
    """Plays a tensor: what a launch asks of one."""

    def __init__(self, dtype=torch.bfloat16, address=4096, device=0, size=100):
        self.dtype, self.address, self.device, self.size = dtype, address, device, size

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device

    def untyped_storage(self):
        return self

    def nbytes(self):
        return self.size


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    kept = {}
    monkeypatch.setattr(launching, "_variants", kept)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kept


def call(kernel, *, tensors=(), strides=(72, 8), counts=(3, 0.5), constants=(64, True), **options):
    tensors = tensors or (Memory(), Memory())
    launch(
        kernel, options.pop("programs", 5), tensors, counts, strides, constants, **{"num_warps": 4, **options}
    )


def test_a_second_call_of_a_kind_launches_the_kept_variant():
    kernel = Kernel()
    first, second = (Memory(), Memory()), (Memory(address=8192), Memory(address=4096 + 16))
    call(kernel, tensors=first, programs=5)
    grid, arguments, options = kernel.compiled[0]
    assert grid == (5,)
    assert arguments == (*first, 3, 0.5, 72, 8, 64, True)
    assert options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    assert kernel.launched == []
    # Another number of programs, counts, addresses and strides of the same kind.
    call(kernel, tensors=second, programs=9, counts=(40, -1.0), strides=(88, 24))
    assert len(kernel.compiled) == 1
    assert kernel.launched == [(0, (9, 1, 1), (8192, 4096 + 16, 40, -1.0, 88, 24, 64, True), 70)]


def launched_in_tritons_own_way(kernel):
    """Whether launches hand tensors over, and not their addresses."""
    own = {isinstance(one[2][0], Memory) for one in kernel.launched}
    assert len(own) == 1
    return own.pop()


def test_a_profilers_hooks_see_launches():
    from triton import knobs

    def hook(*arguments):
        pass

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        kernel = Kernel()
        call(kernel)
        chain.add(hook)
        try:
            call(kernel)
        finally:
            chain.remove(hook)
        assert launched_in_tritons_own_way(kernel)
        kernel.launched.clear()
        call(kernel)
        assert not launched_in_tritons_own_way(kernel)


class CompiledVariant(Variant):
    """Of a release whose launcher is written in C, and doesn't say what it takes."""

    run = dict


class ShortVariant(Variant):
    """Of a release that keeps what the launcher takes elsewhere."""

    function = None


def test_launchers_that_are_not_known_are_left_to_triton(monkeypatch):
    for variant in (StrangeVariant, CompiledVariant, ShortVariant):
        strange = Kernel(variant=variant)
        call(strange)
        call(strange)
        assert launched_in_tritons_own_way(strange)
    on_amd = Kernel()
    monkeypatch.setattr(launching, "_ON_AMD", True)
    call(on_amd)
    call(on_amd)
    assert launched_in_tritons_own_way(on_amd)


def test_tritons_own_launcher_is_known():
    import inspect

    from triton.backends.nvidia.driver import CudaLauncher

    names = tuple(
        name for name in inspect.signature(CudaLauncher.__call__).parameters if name not in ("self", "args")
    )
    assert names in (launching._FIRST, launching._FIRST + launching._SECOND)


def test_the_current_stream_is_asked_for_at_each_launch(monkeypatch):
    kernel = Kernel()
    for stream in (1, 1, 2):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, stream=stream: stream)
        call(kernel)
    assert [one[3] for one in kernel.launched] == [1, 2]


def test_each_kind_has_a_variant_of_its_own():
    kernel = Kernel()
    kinds = [
        {},
        {"tensors": (Memory(torch.float16), Memory())},
        {"tensors": (Memory(), Memory(torch.float16))},
        {"tensors": (Memory(address=4096 + 8), Memory())},
        {"tensors": (Memory(), Memory(address=4096 + 2))},
        {"tensors": (Memory(device=1), Memory(device=1))},
        {"strides": (80, 8)},
        {"strides": (72, 16)},
        {"strides": (1, 8)},
        {"strides": (72, 1)},
        {"strides": (2**31 + 8, 8)},
        {"strides": (2**31, 8)},
        {"constants": (128, True)},
        {"constants": (64, False)},
        {"num_warps": 8},
        {"num_stages": 2},
    ]
    for _ in range(2):
        for kind in kinds:
            call(kernel, **kind)
    assert len(kernel.compiled) == len(kinds)
    assert [one[0] for one in kernel.launched] == list(range(len(kinds)))
    assert {one[3] for one in kernel.launched} == {70, 71}
    other = Kernel()
    call(other)
    assert len(other.compiled) == 1


def test_on_amd_memory_beyond_2_gib_is_another_kind(monkeypatch):
    """There Triton addresses smaller tensors with 32-bit offsets."""
    sizes = (100, 2**31 - 1, 2**31, 2**33)
    kernel = Kernel()
    for size in sizes:
        call(kernel, tensors=(Memory(size=size), Memory()))
    assert len(kernel.compiled) == 1
    monkeypatch.setattr(launching, "_ON_AMD", True)
    kernel = Kernel()
    for size in sizes:
        call(kernel, tensors=(Memory(size=size), Memory()))
    assert len(kernel.compiled) == 2
    assert [one[0] for one in kernel.launched] == [0, 1]


def test_the_interpreter_has_no_variants(kept):
    kernel = Kernel(interpreted=True)
    call(kernel)
    call(kernel)
    assert len(kernel.compiled) == 2
    assert not kept


def key_of(strides, tensors, kept):
    kept.clear()
    call(Kernel(), strides=strides, tensors=tensors)
    ((key, _),) = kept.items()
    return key[1:]  # without the kernel


def specialisation(argument):
    """What Triton itself compiles an argument for."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    return native_specialize_impl(CUDABackend, argument, False, True, True)


@given(st.sampled_from(EDGES) | st.integers(0, 2**34), st.sampled_from(EDGES) | st.integers(0, 2**34))
def test_strides_that_triton_tells_apart_have_different_keys(one, other):
    kept = launching._variants
    tensors = (Memory(), Memory())
    same = key_of((one, 8), tensors, kept) == key_of((other, 8), tensors, kept)
    assert same <= (specialisation(one) == specialisation(other))


def test_tensors_that_triton_tells_apart_have_different_keys(kept):
    room = torch.zeros(64, dtype=torch.int64)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)
    made = [room[start:].view(dtype) for start in (0, 1, 2) for dtype in dtypes]
    made += [room[:2].view(torch.float16)[1:]]
    keys = [key_of((8, 8), (x, x), kept) for x in made]
    for (one, key), (other, other_key) in itertools.combinations(zip(made, keys, strict=True), 2):
        assert (key == other_key) == (specialisation(one) == specialisation(other))


def test_a_kind_that_is_not_compiled_yet_is_refused_inside_a_capture(monkeypatch):
    kernel = Kernel()
    for capturing in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        if kernel.compiled or not capturing:
            call(kernel)
        else:
            with pytest.raises(DuringCaptureError, match="once on these shapes"):
                call(kernel)
    assert len(kernel.compiled) == 1
    assert len(kernel.launched) == 1
