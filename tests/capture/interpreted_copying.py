"""Runs the capture room's copy and fill kernels under Triton's interpreter, on memory of the CPU.

Started by test_copying.py with TRITON_INTERPRET=1, which must be set before Triton is imported. Blocks are small, so
that pieces are cut into several, the last of them a part.
"""

import os

import torch
from hypothesis import given, settings
from interpreting import allow_new_numpy
from test_copying import CPU, check_layout, check_tensors, layouts, tensors
from test_padding import VALUES, as_it_is, check_fill, paddings

from mmgraph.capture import copying, padding

assert os.environ.get("TRITON_INTERPRET") == "1"

copying._BLOCK_SHIFT, copying._BLOCK_BYTES, copying._ROUND_UP = 8, 256, 255
padding._BLOCK_BYTES, padding._MOST_PROGRAMS = 32, 3


def launching(copier):
    copier._launches = True
    return copier


@settings(max_examples=5, deadline=None, derandomize=True)
@given(layouts(most=4))
def few(drawn):
    check_layout(drawn, launching)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(tensors())
def views(drawn):
    check_tensors(drawn, launching(copying.Copier(CPU, None, 0)))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(paddings(most=3))
def filled(drawn):
    check_fill(drawn, as_it_is, fill_by_launch)


def fill_by_launch(leaves, counts, fills):
    leaves = [leaf for leaf in leaves if leaf.view.numel()]
    if leaves:
        padding._launch(leaves, counts, fills)


def more_than_a_launch_takes():
    leaves = [([5, 3], i % 2, 1, torch.float16, False, i, [i % 4, 5]) for i in range(18)]
    check_fill({"leaves": leaves, "seed": 0}, as_it_is, fill_by_launch)
    check_layout(
        {
            "pieces": [(48 * i, 64 * i, 48, 1, 48, 48) for i in range(35)],
            "sizes": [48 * 35, 64 * 35],
            "counts": [1, 2],
            "seed": 0,
        },
        launching,
    )


def runs_about_a_block_long():
    """Runs that end within a block or span several, in each unit."""
    pieces, place = [], 0
    for unit, first in ((16, 0), (4, 4), (1, 1)):
        for inner in (240, 256, 272, 560):
            place += 3 * (inner + 64)
            at = place // 64 * 64 + first
            pieces.append((at, at, inner + first % 4, 2, inner + 2 * unit, inner + unit))
    check_layout({"pieces": pieces, "sizes": [place + 2000] * 2, "counts": [], "seed": 0}, launching)


def every_dtype():
    leaves = [([3, 5], 0, 2, dtype, False, i % 3, [2, 7]) for i, dtype in enumerate(VALUES)]
    check_fill({"leaves": leaves, "seed": 0}, as_it_is, fill_by_launch)


if __name__ == "__main__":
    allow_new_numpy()
    few()
    views()
    filled()
    more_than_a_launch_takes()
    runs_about_a_block_long()
    every_dtype()
    print("same")
