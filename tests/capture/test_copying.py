"""Invariant: exactly the bytes of pieces are copied, a piece says what copy_ would do, and the kernels do the same."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture.copying import Piece, copy_pieces, pieces_of

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
FORMS = ("contiguous", "narrowed", "transposed", "stepped", "expanded")


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def guarded(shape: list[int], dtype: torch.dtype, shift: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and a tensor that lies among them: `shift` elements further than a multiple of 64 bytes."""
    item = dtype.itemsize
    before, size = 64 + shift * item, torch.Size(shape).numel() * item
    room = random_bytes(before + size + 64, seed)
    return room, room[before : before + size].view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; booleans as bytes, of which copy_ keeps only whether they are 0."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, object]:
    """The description of a static view, and of a tensor with fewer rows that lies in memory in some way."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    rows = draw(st.integers(0, shape[axis]))
    if draw(st.integers(0, 9)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    return {
        "shape": shape,
        "axis": axis,
        "rows": min(rows, shape[axis]),
        "dtype": draw(st.sampled_from(DTYPES)),
        "form": draw(st.sampled_from(FORMS)),
        "other": draw(st.integers(0, len(shape) - 1)),
        "shifts": (draw(st.integers(0, 17)), draw(st.integers(0, 17))),
        "seed": draw(st.integers(0, 2**20)),
    }


def lying(drawn: dict, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of these sizes in the drawn form, and all the bytes around it."""
    form, other, dtype = drawn["form"], drawn["other"], drawn["dtype"]
    shift, seed = drawn["shifts"][0], drawn["seed"]
    if form == "narrowed":
        room, base = guarded([n + 2 * (i == other) for i, n in enumerate(sizes)], dtype, shift, seed)
        return room, base.narrow(other, 1, sizes[other])
    if form == "transposed":
        swapped = list(sizes)
        swapped[0], swapped[other] = swapped[other], swapped[0]
        room, base = guarded(swapped, dtype, shift, seed)
        return room, base.transpose(0, other)
    if form == "stepped":
        room, base = guarded([n * (1 + (i == other)) for i, n in enumerate(sizes)], dtype, shift, seed)
        return room, base[(slice(None),) * other + (slice(None, None, 2),)]
    if form == "expanded":
        room, base = guarded([1 if i == other else n for i, n in enumerate(sizes)], dtype, shift, seed)
        return room, base.expand(sizes)
    return guarded(sizes, dtype, shift, seed)


@settings(max_examples=150)
@given(tensors())
def test_a_piece_does_what_copy_would(drawn: dict) -> None:
    shape, axis, rows = drawn["shape"], drawn["axis"], drawn["rows"]
    sizes = [rows if i == axis else n for i, n in enumerate(shape)]
    room, view = guarded(shape, drawn["dtype"], drawn["shifts"][1], drawn["seed"] + 1)
    other_room, other = lying(drawn, sizes)
    piece = pieces_of(other, view, axis)
    plain = drawn["form"] == "contiguous"
    apart = drawn["form"] == "narrowed" and (axis == 0 or drawn["other"] == axis)
    assert piece is not None or not (plain or apart)
    if piece is None:
        return
    expected, other_expected = room.clone(), other_room.clone()
    inside(expected, view, drawn, 1).narrow(axis, 0, rows).copy_(raw(other))
    copy_pieces([piece])
    assert torch.equal(room, expected)
    assert torch.equal(other_room, other_expected)


def inside(room: torch.Tensor, made: torch.Tensor, drawn: dict, which: int) -> torch.Tensor:
    """What lies in a copy of a room where a guarded tensor lies in the room."""
    start = 64 + drawn["shifts"][which] * made.element_size()
    return raw(room[start : start + made.nbytes].view(made.dtype).view(made.shape))


@st.composite
def layouts(draw: st.DrawFn, most: int = 40) -> dict[str, object]:
    """Pieces that lie apart from each other in one source and one destination: places, sizes, pitches."""
    pieces, places = [], [0, 0]
    for _ in range(draw(st.integers(0, most))):
        unit = draw(st.sampled_from((1, 4, 8, 16)))
        inner = unit * draw(st.integers(0, 24))
        runs = draw(st.integers(0, 6))
        pitches = [inner + unit * draw(st.integers(0, 3)) for _ in range(2)]
        starts = []
        for side in range(2):
            start = -(-places[side] // unit) * unit + unit * draw(st.integers(0, 2))
            starts.append(start)
            places[side] = start + pitches[side] * runs + inner
        pieces.append((*starts, inner, runs, *pitches))
    return {"pieces": pieces, "sizes": places, "seed": draw(st.integers(0, 2**20))}


@settings(max_examples=60)
@given(layouts())
def test_exactly_the_bytes_of_the_pieces_are_written(drawn: dict) -> None:
    src = random_bytes(drawn["sizes"][0] + 128, drawn["seed"])
    dst = random_bytes(drawn["sizes"][1] + 128, drawn["seed"] + 1)
    expected, pieces = dst.clone(), []
    src_at, dst_at = src.data_ptr() + 64, dst.data_ptr() + 64
    for a, b, inner, runs, src_pitch, dst_pitch in drawn["pieces"]:
        pieces.append((src_at + a, dst_at + b, inner, runs, src_pitch, dst_pitch))
        for run in range(runs):
            at, to = 64 + a + run * src_pitch, 64 + b + run * dst_pitch
            expected[to : to + inner] = src[at : at + inner]
    copy_pieces(pieces)
    assert torch.equal(dst, expected)


def test_a_scalar_is_a_piece() -> None:
    src, dst = torch.tensor(3.5), torch.tensor(0.0)
    piece = pieces_of(src, dst, 0)
    assert piece is not None
    copy_pieces([piece])
    assert dst.item() == 3.5


class Sub(torch.Tensor):
    pass


VIEW = torch.zeros(4, 3, 2)
REFUSED = {
    "subclass": torch.zeros(4, 3, 2).as_subclass(Sub),
    "expanded rows": torch.zeros(1, 3, 2).expand(4, 3, 2),
    "overlapping rows": torch.zeros(40).as_strided((4, 3, 2), (5, 2, 1)),
    "other dtype": torch.zeros(4, 3, 2, dtype=torch.int32),
    "other device": torch.zeros(4, 3, 2, device="meta"),
    "other sizes": torch.zeros(4, 2, 3),
    "too many rows": torch.zeros(5, 3, 2),
    "fewer axes": torch.zeros(4, 6),
    "no axes": torch.tensor(1.0),
    "negated": torch.zeros(4, 3, 2, dtype=torch.complex64).conj().imag,
    "sparse": torch.ones(4, 3, 2).to_sparse(),
    "three levels": torch.zeros(2, 3, 4).permute(2, 1, 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_piece_cannot_describe_is_refused(name: str) -> None:
    assert pieces_of(REFUSED[name], VIEW, 0) is None


def test_a_conjugated_view_is_refused() -> None:
    view = torch.zeros(4, dtype=torch.complex64)
    assert pieces_of(torch.ones(2, dtype=torch.complex64), view, 0) is not None
    assert pieces_of(torch.ones(2, dtype=torch.complex64).conj(), view, 0) is None


def test_a_view_of_a_packed_buffer_is_one_piece_with_a_pitch() -> None:
    q = torch.zeros(7, 3 * 8)[:, 8:16].unflatten(1, (2, 4))
    view = torch.zeros(9, 2, 4)
    assert pieces_of(q, view, 0) == (q.data_ptr(), view.data_ptr(), 32, 7, 96, 32)
    assert pieces_of(torch.zeros(3, 5), torch.zeros(3, 8), 1)[2:] == (20, 3, 20, 32)  # type: ignore[index]
    assert pieces_of(torch.zeros(3, 8), torch.zeros(3, 8), 1)[2:] == (96, 1, 96, 96)  # type: ignore[index]


def test_strides_of_single_rows_mean_nothing() -> None:
    view = torch.zeros(8).as_strided((1, 8), (999, 1))
    assert pieces_of(torch.zeros(1, 8).as_strided((1, 8), (5, 1)), view, 0)[2:] == (32, 1, 32, 32)  # type: ignore[index]


def test_runs_are_not_read_beyond_their_end() -> None:
    src = (ctypes.c_char * 10)(*b"0123456789")
    dst = (ctypes.c_char * 10)(*b"..........")
    piece: Piece = (ctypes.addressof(src), ctypes.addressof(dst) + 1, 2, 3, 4, 3)
    copy_pieces([piece])
    assert bytes(dst) == b".01.45.89."


def test_the_kernels_do_the_same_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    path = [
        str(root),
        *(str(root / "tests" / name) for name in ("ops", "support")),
        environment.get("PYTHONPATH", ""),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_calls.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("same")
