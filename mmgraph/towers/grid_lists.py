"""Grids as they come, read into host integers and checked.

Promises: nothing is read from a device unless that is allowed by name; what isn't three positive integers for each
item is an error.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.errors import GridError

__all__ = ["Grid", "Grids", "checked_grids", "grids_of"]

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one item."""

Grids = Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""One row of three integers for each item."""

_LARGEST_INT32 = 2**31 - 1
_WANTED = "grids must be rows of 3 integers (frames, rows, columns), one for each item"


def grids_of(grid_thw: Grids, *, allow_sync: bool = False) -> tuple[Grid, ...]:
    """Read grids as host integers.

    Args:
        grid_thw: Rows of three positive integers (frames, rows and columns of patches), as a sequence, an integer array
            or an integer tensor ``[items, 3]``; none is legal.
        allow_sync: Whether a tensor on a device may be read, which waits for the device.

    Returns:
        A tuple of three ints for each item.

    Raises:
        GridError: Something else came, a number isn't positive, int32 can't count all patches, or the grids lie on a
            device.
    """
    return checked_grids(grid_thw, allow_sync=allow_sync)


def checked_grids(grids: Grids, *, merge: int = 1, allow_sync: bool = False) -> tuple[Grid, ...]:
    """Read grids whose rows and columns must be multiples of a merge block's side.

    Args:
        grids: As `grids_of`.
        merge: Side of the merge block.
        allow_sync: As `grids_of`.

    Returns:
        As `grids_of`.

    Raises:
        GridError: As `grids_of`, or rows or columns aren't multiples of ``merge``.
    """
    found = _array(grids, allow_sync)
    if found.size == 0 and (found.ndim == 1 or found.shape == (0, 3)):
        return ()
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype.kind not in "iu":
        raise GridError(f"{_WANTED}; got {found.dtype} of shape {found.shape}")
    result = cast("tuple[Grid, ...]", tuple(map(tuple, found.tolist())))
    # In Python: for as many items as a batch has, a few operations on arrays take longer, and ints don't overflow.
    total = 0
    for number, (frames, height, width) in enumerate(result):
        if frames < 1 or height < 1 or width < 1:
            raise GridError(
                f"frames, rows and columns of a grid must be at least 1; grid {number} is {result[number]}: leave "
                "empty items out"
            )
        if height % merge or width % merge:
            raise GridError(
                f"rows and columns of a grid must be multiples of the merge block's side, {merge}; grid {number} is "
                f"{result[number]}: resize the image to whole merge blocks"
            )
        total += frames * height * width
    if total > _LARGEST_INT32:
        raise GridError(
            f"the grids hold {total} patches, more than int32 can count ({_LARGEST_INT32}): split the batch"
        )
    return result


def _array(grids: Any, allow_sync: bool) -> npt.NDArray[Any]:
    """Whatever came as an array, on the host."""
    if isinstance(grids, torch.Tensor):
        if grids.device.type != "cpu" and not allow_sync:
            raise GridError(
                f"the grids are a tensor on {grids.device}, and reading it waits for the device: move them to the host "
                "first, best where they are made, or allow it with grids_of(..., allow_sync=True)"
            )
        if grids.dtype.is_floating_point or grids.dtype.is_complex:
            raise GridError(f"{_WANTED}; got a tensor of {grids.dtype} of shape {list(grids.shape)}")
        return grids.numpy(force=True)
    try:
        return np.asarray(grids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GridError(f"{_WANTED}: {error}") from error
