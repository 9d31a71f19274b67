"""Runs the kernels of a graph's own nodes under Triton's interpreter, on memory of the CPU.

Started by test_copying.py with TRITON_INTERPRET=1, which must be set before Triton is imported. Blocks are small and
programs few, so that a program goes on to further blocks, the last of them a part.
"""

import os

import torch
from call_kernels import (
    check_fetch,
    check_more_leaves_than_a_launch_takes,
    check_publish,
    check_runs_about_as_long_as_a_block,
    check_stage,
    publications,
    stagings,
)
from hypothesis import given, settings
from interpreting import allow_new_numpy, patch_once
from test_padding import VALUES, as_it_is, check_fill, paddings

from mmgraph.capture import padding, publishing

assert os.environ.get("TRITON_INTERPRET") == "1"

CPU = torch.device("cpu")
BLOCK = 64
padding._BLOCK_BYTES, padding._MOST_PROGRAMS = 32, 3
publishing._BLOCK_BYTES, publishing._MOST_PROGRAMS = BLOCK, 3

few = settings(max_examples=3, deadline=None, derandomize=True, database=None)


@few
@given(stagings(most=4))
def staged(drawn):
    check_stage(drawn, CPU)


@few
@given(publications(most=4))
def published(drawn):
    check_publish(drawn, CPU)


@few
@given(paddings(most=3))
def filled(drawn):
    check_fill(drawn, as_it_is, fill_by_launch)


def fill_by_launch(leaves, counts, fills):
    leaves = [leaf for leaf in leaves if leaf.view.numel()]
    if leaves:
        padding._launch(leaves, counts, fills)


def each_kind_of_output():
    """Rows of each unit along each axis, offsets, one shape and none, and outputs that go nowhere."""
    leaves = [
        ("rows", [7, 3, 8], 0, 2, torch.bfloat16, 9, False, (0, 8)),
        ("rows", [3, 9, 5], 1, 1, torch.float32, 4, False, (1, 2)),
        ("rows", [5, 7], 1, 1, torch.bool, 3, False, (3, 1)),
        ("rows", [6, 2], 0, 1, torch.complex128, 6, False, (0, 0)),
        ("rows", [4, 40], 0, 1, torch.float32, 0, False, (0, 0)),
        ("rows", [4, 8], 0, 1, torch.float32, 2, True, (0, 0)),
        ("offsets", [33], 0, 1, torch.int32, 20, False, (1, 1)),
        ("offsets", [6], 0, 1, torch.int64, 5, False, (0, 1)),
        ("static", [3, 25], 0, 1, torch.bfloat16, 1, False, (1, 1)),
        ("static", [], 0, 1, torch.float32, 0, False, (0, 0)),
    ]
    check_publish({"leaves": leaves, "seed": 0}, CPU)


def padding_of_every_dtype():
    """More leaves than a launch takes."""
    leaves = [([3, 5], 0, 2, dtype, False, i % 3, [2, 7]) for i, dtype in enumerate([*VALUES, torch.bool])]
    check_fill({"leaves": leaves, "seed": 0}, as_it_is, fill_by_launch)


if __name__ == "__main__":
    allow_new_numpy()
    patch_once()
    torch.set_num_threads(1)
    staged()
    published()
    filled()
    each_kind_of_output()
    padding_of_every_dtype()
    check_more_leaves_than_a_launch_takes(CPU)
    check_runs_about_as_long_as_a_block(CPU, BLOCK)
    check_fetch(width=5, number=3, calls=7, device=CPU)
    check_fetch(width=1, number=2, calls=3, device=CPU)
    print("same")
