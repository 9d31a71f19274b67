"""Invariant: the window kernels' blocks fit the GPU and are safe for its assembler; short sequences get to them, and
whole windows in half precision to the kernel that is for them only."""

import itertools

import pytest
import torch

from mmgraph.ops.attention import triton_backend, windows
from mmgraph.ops.attention.windows import split_width, window_blocks

SHARED = (99 * 1024, 163 * 1024, 227 * 1024)
# A width of each way of cutting, the narrowest and the widest.
KINDS = (1, 16, 17, 24, 32, 33, 48, 64, 65, 80, 81, 96, 97, 128, 129, 144, 145, 160, 161, 192, 193, 256)


def is_power(value):
    return value & (value - 1) == 0


@pytest.mark.parametrize("width", range(1, 257))
def test_a_split_holds_the_width(width):
    first, rest = split_width(width)
    assert is_power(first)
    assert first >= 16
    if rest:
        assert is_power(rest)
        assert 16 <= rest < first < width <= first + rest
        # It holds less than one padded width would.
        assert first + rest < 1 << (width - 1).bit_length()
    else:
        assert width <= first
        assert first == 16 or first < 2 * width


def held_bytes(blocks, item_size, width, v_width, shared):
    """Shared memory of a program, by what Triton's compiler takes (see bench/machine_code.py)."""
    widths = sum(split_width(width)), sum(split_width(v_width))
    q = blocks.rows // blocks.parts * widths[0]
    kv = blocks.rows * sum(widths)
    groups = blocks.warps == 4 and item_size == 2 and shared == SHARED[-1]  # instructions of warp groups
    if blocks.stages == 1:
        held = kv + q * (groups or item_size == 4)
    else:
        held = (q + kv) * (blocks.stages if groups else blocks.stages - 1)
    return held * item_size + (16 * 1024 if blocks.stages > 1 or groups else 0)


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("shared", SHARED)
def test_blocks_fit_in_shared_memory(item_size, shared):
    for width, v_width in itertools.product(KINDS, KINDS):
        for batch, heads in itertools.product((1, 10_000, 100_000), (1, 16)):
            blocks = window_blocks(item_size, width, v_width, 640_000, batch, heads, shared)
            assert held_bytes(blocks, item_size, width, v_width, shared) <= shared, (width, v_width, blocks)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("width", range(1, 257))
def test_blocks_are_ones_that_the_kernel_takes(width, shared):
    for item_size, v_width, batch in itertools.product((2, 4), KINDS, (1, 10_000, 100_000)):
        blocks = window_blocks(item_size, width, v_width, 640_000, batch, 16, shared)
        rows = blocks.rows // blocks.parts
        assert is_power(blocks.rows)
        assert blocks.rows % blocks.parts == 0
        assert 16 <= rows <= blocks.rows <= 64
        assert blocks.warps in (1, 2, 4)
        assert blocks.heads >= 1
        assert blocks.stages >= 1
        # A tile of 64 rows and four warps are a warp group: with it, narrow tiles are unsafe in half precision.
        if item_size == 2 and (split_width(width)[1] or split_width(v_width)[1]):
            assert blocks.warps < 4
            assert blocks.stages > 1
        # A program's accumulators in registers: at most 128 for each of its threads.
        assert rows * sum(split_width(v_width)) <= 128 * 32 * blocks.warps


def test_many_programs_take_more_heads_each():
    for mean in (8, 64):
        few, many = (window_blocks(2, 72, 72, mean * n, n, 16, SHARED[-1]) for n in (8, 8192))
        assert many.heads > few.heads


def test_short_sequences_share_programs_and_windows_have_their_own():
    for mean, packed in ((1, True), (16, True), (39, True), (40, False), (64, False)):
        assert window_blocks(2, 80, 80, 100 * mean, 100, 16, SHARED[-1]).packed == packed


@pytest.fixture
def launches(monkeypatch):
    """What the two kernels would be launched with."""
    seen = []
    modules = {
        "attention.window_kernels": "window_kernel",
        "attention.full_window_kernels": "full_window_kernel",
        "attention.triton_kernels": "attention_kernel",
    }

    class Module:
        def __init__(self, name):
            setattr(self, modules[name], modules[name])

    for module in (windows, triton_backend):
        monkeypatch.setattr(module, "kernel_module", Module)
        monkeypatch.setattr(module, "launch", lambda *arguments, **options: seen.append((arguments, options)))
    return seen


def call(longest, blocks=None, heads=3, width=72, tokens=130):
    q = torch.zeros(tokens, heads, width, dtype=torch.float16)
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    triton_backend.forward(q, q, q, cu, longest, 0.25, False, False, blocks)


def test_sequences_of_up_to_64_rows_go_to_the_window_kernel(launches):
    for longest in (1, 63, 64, 65, 4096):
        call(longest)
    call(64, triton_backend.Blocks(16, 16, 4, 1))
    assert [arguments[0] for arguments, _ in launches] == ["window_kernel"] * 3 + ["attention_kernel"] * 3


@pytest.mark.parametrize(
    ("form", "programs"),
    [
        ((64, True, 1, 4, 2, 2), 3 * 2),
        ((64, True, 2, 2, 4, 3), 3 * 1 * 2),
        ((64, True, 4, 1, 1, 1), 3 * 3 * 4),
        ((32, True, 1, 4, 1, 1), 5 * 3),
        ((64, False, 1, 4, 2, 2), 2 * 2),  # one sequence, and one place more for the tail
        ((64, False, 2, 2, 1, 3), 2 * 3 * 2),
    ],
)
def test_programs_cover_all_tiles_heads_and_parts(launches, monkeypatch, form, programs):
    monkeypatch.setattr(windows, "window_blocks", lambda *arguments: windows.WindowBlocks(*form))
    call(64)
    ((arguments, options),) = launches
    assert arguments[1] == programs
    assert options == {"num_warps": form[3], "num_stages": 1}


class OnGpu:
    """Plays a tensor of a GPU: what the choice of a kernel asks of one."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, rows, heads, width, item_size):
        self.shape, self.size = (rows, heads, width), item_size

    def element_size(self):
        return self.size


@pytest.fixture
def of_known_release(monkeypatch):
    monkeypatch.setattr(windows, "knows_gluon", lambda: True)
    monkeypatch.setattr(windows, "shared_bytes", lambda device: SHARED[-1])


def takes(rows=640, batch=10, width=80, v_width=80, item_size=2, aligned=True):
    q, v = (OnGpu(rows, 4, w, item_size) for w in (width, v_width))
    return windows.takes_full_windows(q, v, batch, aligned)


def test_whole_aligned_windows_in_half_precision_have_a_kernel_of_their_own(monkeypatch, of_known_release):
    assert takes()
    assert takes(rows=10 * windows.FULL_PER_HEAD)
    assert not takes(rows=10 * windows.FULL_PER_HEAD - 1)
    assert not takes(item_size=4)
    assert not takes(aligned=False)
    monkeypatch.setattr(windows, "shared_bytes", lambda device: 48 * 1024)
    assert takes()
    assert not takes(width=160)
    monkeypatch.setattr(windows, "knows_gluon", lambda: False)
    assert not takes()


def test_a_cpus_tensors_never_go_there(of_known_release):
    q = torch.zeros(640, 4, 80, dtype=torch.bfloat16)
    assert not windows.takes_full_windows(q, q, 10, True)


@pytest.mark.parametrize("width", range(1, 257))
def test_every_width_of_whole_pieces_fits_on_every_gpu(width, of_known_release, monkeypatch):
    """Rows may be aligned where the width isn't of 16-byte pieces; one copy can't take two bytes."""
    monkeypatch.setattr(windows, "shared_bytes", lambda device: SHARED[0])
    assert takes(width=width, v_width=width) == (width % 8 == 0)
    assert takes(width=width, v_width=64) == (width % 8 == 0)
    assert takes(width=64, v_width=width) == (width % 8 == 0)


@pytest.mark.parametrize("lengths", [[64] * 3, [64, 40, 0, 64]])
def test_each_sequence_and_head_has_a_program_and_the_tail_one_more(launches, monkeypatch, lengths):
    monkeypatch.setattr(windows, "takes_full_windows", lambda *arguments: True)
    q = torch.zeros(sum(lengths), 3, 72, dtype=torch.float16)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    triton_backend.forward(q, q, q, cu, 64, 0.25, False, False)
    ((arguments, options),) = launches
    assert arguments[0] == "full_window_kernel"
    assert arguments[1] == 3 * (len(lengths) + 1)
    assert options == {"num_warps": 4, "num_stages": 1}


def test_rows_too_far_apart_for_32_bits_across_a_block_are_brought_together():
    room = torch.empty_strided((2, 1, 8), (1 << 24, 8, 1), dtype=torch.float16)
    room.copy_(torch.arange(16.0).view(2, 1, 8))
    near = triton_backend._rows_near(room)
    assert near.is_contiguous()
    assert torch.equal(near, room)
    beside = torch.empty_strided((2, 1, 8), ((1 << 24) - 8, 8, 1), dtype=torch.float16, device="meta")
    assert triton_backend._rows_near(beside) is beside
