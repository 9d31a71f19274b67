"""What every kernel file shares: the recording of a fault in the error flag, from inside a Triton kernel.

Triton's language isn't Python's types, so this file isn't type-checked.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def record(flag_ptr, FAULT: tl.constexpr, row, value):
    """Count a fault; the first one of its kind also leaves its row and value."""
    seen = tl.atomic_add(flag_ptr + 3 * FAULT, 1)
    if seen == 0:
        tl.store(flag_ptr + 3 * FAULT + 1, row)
        tl.store(flag_ptr + 3 * FAULT + 2, value)
