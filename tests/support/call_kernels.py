"""What a graph's own nodes fetch, stage and publish, launched one by one on any device, against plain torch.

On a CPU the kernels run under Triton's interpreter. Tensors lie in rooms of random bytes, so that stray writes show.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from mmgraph.capture import publishing
from mmgraph.capture.launching import STAND_IN, variant_of
from mmgraph.capture.publishing import NUMBERS, PublishLeaf

DTYPES = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128)
GUARD = 64


def random_bytes(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def record_of(numbers: Sequence[int], device: torch.device) -> Any:
    """What stands for a generation: the record of one call."""
    return SimpleNamespace(record=torch.tensor(numbers, dtype=torch.int64, device=device), on_cuda=True)


@st.composite
def stagings(draw: st.DrawFn, most: int = 5, longest: int = 20) -> dict[str, Any]:
    """Inputs of several runs, where pitches, places and the bytes of a run are multiples of a unit, or aren't."""
    leaves = []
    for _ in range(draw(st.integers(1, most))):
        unit = draw(st.sampled_from((1, 4, 8, 16)))
        inner, runs = unit * draw(st.integers(0, longest)), draw(st.integers(0, 5))
        pitches = [inner + unit * draw(st.integers(0, 3)) for _ in range(2)]
        shifts = [unit * draw(st.integers(0, 3)) for _ in range(2)]
        leaves.append((inner, runs, *pitches, *shifts))
    return {"leaves": leaves, "seed": draw(st.integers(0, 2**20))}


def check_stage(drawn: dict[str, Any], device: torch.device) -> None:
    """Every byte of the static buffers, and around them, is what a loop over the runs makes it."""
    generator = torch.Generator().manual_seed(drawn["seed"])
    numbers, views, rooms, wanted, kept = [-1], [], [], [], []
    for inner, runs, src_pitch, dst_pitch, src_shift, dst_shift in drawn["leaves"]:
        src = random_bytes(src_shift + src_pitch * runs + 1, generator)
        size = max(1, dst_pitch * runs)
        room = random_bytes(GUARD + dst_shift + size + GUARD, generator)
        there, source = room.to(device, copy=True), src.to(device)
        view = there[GUARD + dst_shift : GUARD + dst_shift + size]
        views.append((view, len(numbers)))
        # Of nothing to stage, the record has zeros.
        nothing = inner * runs == 0
        numbers += (
            (0,) * NUMBERS if nothing else (source.data_ptr() + src_shift, inner, runs, src_pitch, dst_pitch)
        )
        for run in range(runs):
            to, at = GUARD + dst_shift + run * dst_pitch, src_shift + run * src_pitch
            room[to : to + inner] = src[at : at + inner]
        rooms.append(there)
        wanted.append(room)
        kept.append(source)
    publishing.stage(record_of(numbers, device), views)
    for there, room in zip(rooms, wanted, strict=True):
        assert torch.equal(there.cpu(), room)


@st.composite
def publications(draw: st.DrawFn, most: int = 4, longest: int = 6) -> dict[str, Any]:
    """Outputs with a size before, at or beyond their rows'; offsets, outputs of one shape, and ones that go nowhere."""
    leaves = []
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(("rows", "rows", "offsets", "static")))
        dtype, per, axis = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 3)), 0
        shape = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
        if kind == "rows":
            axis = draw(st.integers(0, len(shape) - 1))
        elif kind == "offsets":
            dtype, per = draw(st.sampled_from((torch.int32, torch.int64))), 1
            shape = [draw(st.integers(1, 5 * longest))]
        elif draw(st.booleans()):
            shape = []
        if shape and draw(st.integers(0, 9)) == 0:
            shape[-1] = 0
        count = draw(st.integers(0, ((shape[axis] if shape else 1) + 1) * per))
        shifts = (draw(st.integers(0, 17)), draw(st.integers(0, 17)))
        leaves.append((kind, shape, axis, per, dtype, count, draw(st.integers(0, 4)) == 0, shifts))
    return {"leaves": leaves, "seed": draw(st.integers(0, 2**20))}


def check_publish(drawn: dict[str, Any], device: torch.device) -> None:
    """The real rows of each output lie at its address one behind the other, and nothing else was written."""
    generator = torch.Generator().manual_seed(drawn["seed"])
    number = len(drawn["leaves"])
    counts, targets, leaves, rooms, wanted = [], [], [], [], []
    for index, (kind, shape, axis, per, dtype, count, nowhere, shifts) in enumerate(drawn["leaves"]):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = shifts[0] * dtype.itemsize
        source = random_bytes(start + nbytes, generator)[start:]
        if dtype == torch.bool:
            source &= 1
        base = torch.empty(start + nbytes, dtype=torch.uint8, device=device)
        result = base[start:].copy_(source).view(dtype).view(shape)
        place = GUARD + shifts[1] * dtype.itemsize
        room = random_bytes(place + nbytes + GUARD, generator)
        there = room.to(device, copy=True)
        counts.append(count)
        targets.append(0 if nowhere else there.data_ptr() + place)
        real = source.view(dtype).view(shape)
        if kind != "static":
            more = int(kind == "offsets")
            real = real.narrow(axis, 0, min(count // per + more, shape[axis]))
        if not nowhere:
            octets = real.contiguous().view(-1).view(torch.uint8)
            room[place : place + octets.numel()] = octets
        static = kind == "static"
        leaves.append(
            PublishLeaf(result, axis, per, -1 if static else index, kind == "offsets", number + index)
        )
        rooms.append(there)
        wanted.append(room)
    generation = record_of([*counts, *targets], device)
    generation.publish_leaves = lambda flat: leaves
    publishing.publish(generation, [leaf.source for leaf in leaves], ())
    for there, room in zip(rooms, wanted, strict=True):
        assert torch.equal(there.cpu(), room)


def check_more_leaves_than_a_launch_takes(device: torch.device) -> None:
    check_stage({"leaves": [(48, 1, 48, 48, i, 0) for i in range(18)], "seed": 0}, device)
    rows = [("rows", [3, 2], i % 2, 1, torch.float32, i % 4, False, (i, 0)) for i in range(18)]
    check_publish({"leaves": rows, "seed": 0}, device)


def check_runs_about_as_long_as_a_block(device: torch.device, block: int) -> None:
    """Runs that end within a block, at its end, or span several, in each unit."""
    for unit in (16, 4, 1):
        sizes = [block - unit, block, block + unit, 2 * block + 3 * unit]
        leaves = [(n, 3, n + unit, n + 2 * unit, unit, unit) for n in sizes]
        check_stage({"leaves": leaves, "seed": unit}, device)


def check_fetch(width: int, number: int, calls: int, device: torch.device) -> None:
    """Each launch brings the next slot into the record and tells so; a slot of another call's gives nothing."""
    from mmgraph.capture.call_kernels import fetch_kernel

    pinned = device.type == "cuda"
    slots = torch.full((number, width + 1), -7, dtype=torch.int64, pin_memory=pinned)
    read = torch.full((3,), -7, dtype=torch.int64, pin_memory=pinned)
    count = torch.tensor([-7, 0, -7], device=device)
    record = torch.full((width + 2,), -7, dtype=torch.int64, device=device)
    lanes = 1 << (width - 1).bit_length()
    variant = variant_of(fetch_kernel, (STAND_IN,) * 4, (number, width, lanes), device, num_warps=1)
    generator = torch.Generator().manual_seed(width)

    def fetch() -> None:
        at = (slots.data_ptr(), count[1:].data_ptr(), read[1:].data_ptr(), record[1:].data_ptr())
        variant.launch(1, *at)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in range(calls):
        values = torch.randint(-(2**62), 2**62, (width,), generator=generator)
        slots[call % number] = torch.cat([values, torch.tensor([call])])
        before = slots.clone()
        fetch()
        assert record.tolist() == [-7, *values.tolist(), -7]
        assert count.tolist() == [-7, call + 1, -7]
        assert read.tolist() == [-7, call + 1, -7]
        assert torch.equal(slots, before)
    for wrong in (calls - 1, calls + 2):
        slots[:, -1] = wrong
        fetch()
        assert read.tolist() == [-7, 2**62, -7]  # beyond any call
        assert record.tolist() == [-7, *[0] * width, -7]
