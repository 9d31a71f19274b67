"""Invariant: on CUDA, copies and fills of padding write what the plain forms do, without a wait or a late compile."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture import copying, launching
from mmgraph.capture.copying import Copier, pieces_of, pieces_out
from mmgraph.capture.errors import NotCapturableError
from mmgraph.capture.padding import PadLeaf, fill_padding, fill_padding_reference, fill_pattern

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
DTYPES = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def random_bytes(size: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))


def draw_layout(rng: np.random.Generator, number: int, largest: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Pieces that don't overlap, by their places in one source and one destination, and the sizes of these."""
    pieces, places = [], [0, 0]
    for _ in range(number):
        unit = int(rng.choice((1, 2, 4, 8, 16)))
        inner = unit * int(rng.integers(0, rng.choice((3, 40, largest)) // unit + 2))
        runs = int(rng.integers(0, 9))
        pitches = [inner + unit * int(rng.integers(0, 4)) for _ in range(2)]
        starts = []
        for side in range(2):
            starts.append(-(-places[side] // unit) * unit + unit * int(rng.integers(0, 3)))
            places[side] = starts[side] + pitches[side] * runs + inner
        pieces.append((*starts, inner, runs, *pitches))
    return pieces, places


def placed(pieces: list[tuple[int, ...]], src: torch.Tensor, dst: torch.Tensor) -> list[copying.Piece]:
    return [(src.data_ptr() + p[0], dst.data_ptr() + p[1], *p[2:]) for p in pieces]  # type: ignore[misc]


@settings(max_examples=60)
@given(st.integers(0, 40), st.sampled_from((300, 50_000)), st.integers(0, 2**20))
def test_pieces_of_every_alignment_are_copied_and_nothing_else(number: int, largest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces, (src_size, dst_size) = draw_layout(rng, number, largest)
    src, dst = random_bytes(src_size + 64, rng), random_bytes(dst_size + 64, rng)
    there, target = src.to(DEVICE), dst.to(DEVICE)
    values = rng.integers(-(2**63), 2**63 - 1, 3).tolist()
    counts, wanted = torch.full((5,), 77, device=DEVICE), torch.full((5,), 77)
    Copier(DEVICE, counts[1:4], 3)(placed(pieces, there, target), values)
    Copier(CPU, wanted[1:4], 3)(placed(pieces, src, dst), values)
    assert torch.equal(target.cpu(), dst)
    assert counts.tolist() == [77, *values, 77] == wanted.tolist()


@settings(max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 2),
    st.sampled_from(("contiguous", "narrowed", "packed")),
    st.integers(0, 9),
    st.integers(0, 2**20),
)
def test_tensors_come_in_and_go_out(dtype: torch.dtype, axis: int, form: str, shift: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.integers(1, 40, 3)]
    rows = int(rng.integers(0, shape[axis] + 1))
    sizes = [rows if i == axis else n for i, n in enumerate(shape)]
    wide = [
        n + 3 * ((i == axis and form == "narrowed") or (i == 2 and form == "packed"))
        for i, n in enumerate(sizes)
    ]
    item = dtype.itemsize

    def made(of: list[int]) -> torch.Tensor:
        octets = random_bytes((shift + int(np.prod(of))) * item, rng).to(DEVICE)
        octets = octets & 1 if dtype == torch.bool else octets
        return octets[shift * item :].view(dtype).view(of)

    view, src, result = made(shape), made(wide), made(sizes)
    src = src.narrow(axis, 0, rows).narrow(2, 0, sizes[2])
    into, out = pieces_of(src, view, axis), pieces_out(view, result, axis)
    assert out is not None
    assert (into is not None) or form == "packed"
    copier = Copier(DEVICE, None, 0)
    if into is None:
        view.narrow(axis, 0, rows).copy_(src)
    else:
        copier([into])
    copier([out])
    assert torch.equal(as_bytes(result), as_bytes(src))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE).copy_(tensor).view(-1).view(torch.uint8)


def test_offsets_beyond_two_gibibytes() -> None:
    size = 2**31 + 4096 + 48
    src = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    src[:1000] = 1
    src[2**31 - 500 :] = torch.arange(size - 2**31 + 500, device=DEVICE).to(torch.uint8)
    copier = Copier(DEVICE, None, 0)
    for shift in (0, 4, 1):
        dst = torch.full((size,), 9, dtype=torch.uint8, device=DEVICE)
        part, target = src[shift : size - 16], dst[shift : size - 16]
        piece = pieces_of(part, target, 0)
        assert piece is not None
        copier([piece])
        assert torch.equal(part, target)
        assert bool((dst[:shift] == 9).all())
        assert bool((dst[size - 16 :] == 9).all())
    dst = torch.full((3, 32), 9, dtype=torch.uint8, device=DEVICE)
    copier([(src.data_ptr(), dst.data_ptr(), 16, 3, 2**30, 32)])  # runs far apart
    assert torch.equal(dst[:, :16], torch.stack([src[i * 2**30 :][:16] for i in range(3)]))
    assert bool((dst[:, 16:] == 9).all())


def test_nothing_compiles_after_prepare(monkeypatch: pytest.MonkeyPatch, no_waiting: None) -> None:
    from triton import knobs

    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs["key"]))
    counts = torch.zeros(11, dtype=torch.int64, device=DEVICE)  # so many that no other test has a variant
    copier = Copier(DEVICE, counts, 11)
    copier.prepare(20)
    assert len(compiled) == 5
    compiled.clear()
    src, dst = (
        torch.ones(2**16, dtype=torch.uint8, device=DEVICE),
        torch.zeros(2**16, dtype=torch.uint8, device=DEVICE),
    )
    for number in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 20):
        for size in (1, 4, 16, 2048):
            pieces = placed([(i * size, i * size, size, 1, size, size) for i in range(number)], src, dst)
            copier(pieces, (1, 0, 16, 2**40, -1, *range(6)))
            copier(pieces)
    assert compiled == []
    Copier(DEVICE, counts, 11).prepare(20)  # another one finds them
    assert compiled == []


def test_a_launch_goes_to_the_current_stream_and_can_be_captured() -> None:
    src, dst = torch.arange(5000, device=DEVICE), torch.zeros(6000, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    copier = Copier(DEVICE, counts, 1)
    copier.prepare(1)
    piece = pieces_of(src, dst, 0)
    assert piece is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copier([piece], (42,))
    torch.cuda.synchronize()
    assert int(counts) == 0
    src += 1
    graph.replay()
    assert torch.equal(dst[:5000], src)
    assert int(counts) == 42


def test_a_profiler_is_told_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    told: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "launch_enter_hook", lambda metadata: told.append(metadata.get()["name"])
    )
    src, dst = torch.arange(64, device=DEVICE), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    piece = pieces_of(src, dst, 0)
    assert piece is not None
    Copier(DEVICE, None, 0)([piece])
    assert torch.equal(src, dst)
    assert told == ["copy_kernel"]


def test_the_known_launcher_is_used() -> None:
    copier = Copier(DEVICE, None, 0)
    copier.prepare(32)
    variants = [v for key, v in launching._variants.items() if key[3] == DEVICE]
    assert variants
    assert all(v._run is not None for v in variants) or torch.version.hip is not None


def leaves_on(
    rng: np.random.Generator, number: int, longest: int
) -> tuple[list[torch.Tensor], list[tuple[int, int, torch.Size, int, torch.dtype]], list[PadLeaf]]:
    """Rooms of random bytes on the CPU, where views lie in them, and leaves over these."""
    rooms, where, leaves = [], [], []
    for index in range(number):
        offsets = bool(rng.integers(0, 3) == 0)
        dtype = (torch.int32, torch.int64)[index % 2] if offsets else DTYPES[int(rng.integers(len(DTYPES)))]
        axis = 0 if offsets else int(rng.integers(0, 3))
        shape = torch.Size([int(rng.integers(0, longest))] if offsets else rng.integers(1, 30, 3).tolist())
        if not offsets and rng.integers(0, 4) == 0:
            shape = torch.Size([longest, 3])
            axis = int(rng.integers(0, 2))
        start = 64 + int(rng.integers(0, 9)) * dtype.itemsize
        room = random_bytes(start + shape.numel() * dtype.itemsize + 64, rng)
        rooms.append(room)
        where.append((start, shape.numel() * dtype.itemsize, shape, axis, dtype))
        leaves.append(PadLeaf(view_in(room, where[-1]), axis, int(rng.integers(1, 4)), index, index, offsets))
    return rooms, where, leaves


def view_in(room: torch.Tensor, at: tuple[int, int, torch.Size, int, torch.dtype]) -> torch.Tensor:
    start, size, shape, _, dtype = at
    return room[start : start + size].view(dtype).view(shape)


@settings(max_examples=30)
@given(st.integers(1, 20), st.sampled_from((50, 9000)), st.integers(0, 2**20))
def test_a_captured_fill_follows_the_counts(number: int, longest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rooms, where, leaves = leaves_on(rng, number, longest)
    there = [room.to(DEVICE) for room in rooms]
    moved = [
        PadLeaf(view_in(room, at), leaf.axis, leaf.per, leaf.count, leaf.fill, leaf.offsets)
        for room, at, leaf in zip(there, where, leaves, strict=True)
    ]
    fills = torch.tensor([fill_pattern(1.5 if at[4].is_floating_point else 1, at[4]) for at in where])
    counts = torch.zeros(number, dtype=torch.int64)
    counts_there, fills_there = counts.to(DEVICE), fills.to(DEVICE)
    fill_padding(moved, counts_there, fills_there)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_padding(moved, counts_there, fills_there)
    for _ in range(3):
        for room, target in zip(rooms, there, strict=True):
            room.copy_(random_bytes(room.numel(), rng))
            target.copy_(room)
        # No rows, all of them and more among the counts.
        drawn = [
            int(rng.integers(-1, at[2][leaf.axis] * leaf.per + 3))
            for at, leaf in zip(where, leaves, strict=True)
        ]
        counts.copy_(torch.tensor(drawn))
        counts_there.copy_(counts)
        graph.replay()
        fill_padding_reference(leaves, counts, fills)
        for room, target in zip(rooms, there, strict=True):
            assert torch.equal(room, target.cpu())


def test_a_fill_waits_for_nothing(no_waiting: None) -> None:
    view = torch.zeros(300, 64, device=DEVICE)
    counts, fills = torch.full((1,), 7, device=DEVICE), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts, fills)


def test_a_capture_of_something_not_yet_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_variants", {})
    view = torch.zeros(30, 64, device=DEVICE)
    counts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    fills = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    leaves = [PadLeaf(view, 0, 1, 0, 0, False)]
    copier = Copier(DEVICE, None, 0)

    def capture(function: Callable[[], None]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            view.add_(1)
            function()

    with pytest.raises(NotCapturableError, match="compiled"):
        capture(lambda: fill_padding(leaves, counts, fills))
    with pytest.raises(NotCapturableError, match="compiled"):
        capture(lambda: copier.prepare(2))
    view.fill_(3)
    fill_padding(leaves, counts, fills)
    assert bool((view == 0).all())


def test_padding_beyond_two_gibibytes() -> None:
    view = torch.full((2**21 + 8, 1024), 5, dtype=torch.uint8, device=DEVICE)
    counts = torch.full((1,), 2**21 + 3, device=DEVICE)
    fills = torch.tensor([fill_pattern(200, torch.uint8)], device=DEVICE)
    fill_padding([PadLeaf(view, 0, 1, 0, 0, False)], counts, fills)
    assert bool((view[: 2**21 + 3] == 5).all())
    assert bool((view[2**21 + 3 :] == 200).all())
