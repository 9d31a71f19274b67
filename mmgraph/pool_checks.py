"""What a pool's arguments must be, and the errors that more than one call raises.

Promises: a check reads shapes, types and devices alone, so it never waits for a device; it changes nothing.
"""

from collections.abc import Hashable
from typing import Any, Protocol

import torch

from mmgraph.errors import PoolArgumentError, PoolCaptureError


class Target(Protocol):
    """What parts must fit."""

    @property
    def width(self) -> int:
        """Columns."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""


def check_bounds(rows: Any, width: Any, dtype: Any, page_rows: Any, max_bytes: Any) -> int:
    """Check what says how large a pool is.

    Returns:
        Rows in whole pages, as many as both bounds allow.

    Raises:
        PoolArgumentError: One is of the wrong kind, or no page is left.
    """
    whole = {"rows": rows, "width": width, "page_rows": page_rows}
    if max_bytes is not None:
        whole["max_bytes"] = max_bytes
    for name, value in whole.items():
        if not _positive(value):
            raise PoolArgumentError(f"{name} must be an integer of at least 1, got {value!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PoolArgumentError(f"dtype must be a floating-point torch dtype, got {dtype!r}")
    row_bytes = width * dtype.itemsize
    bound: int = rows if max_bytes is None else min(rows, max_bytes // row_bytes)
    kept: int = bound // page_rows * page_rows
    if not 0 < kept < 2**31:
        raise PoolArgumentError(
            f"a pool must have at least one page and fewer than 2**31 rows; rows={rows} and max_bytes={max_bytes} "
            f"allow {bound} rows of {row_bytes} bytes, and a page has {page_rows}; change rows, max_bytes or page_rows"
        )
    return kept


def checked_key(key: Any) -> Hashable:
    """Give a key that can be hashed.

    Raises:
        PoolArgumentError: It can't.
    """
    try:
        hash(key)
    except TypeError as error:
        raise PoolArgumentError(f"a key must be hashable, got {type(key).__name__}: {error}") from error
    return key  # type: ignore[no-any-return]


def check_rows_wanted(key: Any, rows: Any) -> None:
    """Check a key and how many rows are wanted under it.

    Raises:
        PoolArgumentError: The key can't be hashed, or the rows aren't a positive integer.
    """
    checked_key(key)
    if not _positive(rows):
        raise PoolArgumentError(f"rows of {named(key)} must be an integer of at least 1, got {rows!r}")


def check_parts(parts: tuple[Any, ...], rows: int, keys: int, target: Target) -> None:
    """Check rows that are to be stored.

    Args:
        parts: What came.
        rows: How many rows each must have.
        keys: Of how many keys those are.
        target: What they go into.

    Raises:
        PoolArgumentError: There are none, or one is no such tensor or needs a gradient, or they are too wide.
    """
    for part in parts:
        fits = isinstance(part, torch.Tensor) and part.dim() == 2 and part.shape[0] == rows
        if (
            not fits
            or not part.is_floating_point()
            or part.layout != torch.strided
            or part.device != target.device
        ):
            came = type(part).__name__
            if isinstance(part, torch.Tensor):
                came = f"{part.dtype} {list(part.shape)} on {part.device}"
            raise PoolArgumentError(
                f"fill: each part must be a dense floating-point tensor [{rows}, w] on {target.device}, the rows of "
                f"{keys} keys one after another; got {came}"
            )
        if part.requires_grad:
            raise PoolArgumentError(
                "fill: rows in a pool have no gradient, and a part needs one; encode under torch.no_grad() or "
                "torch.inference_mode(), or detach the part"
            )
    widths = [part.shape[1] for part in parts]
    if not parts or sum(widths) > target.width:
        raise PoolArgumentError(
            f"fill: at least one part is needed, and all together at most {target.width} columns; got widths {widths}"
        )


def other_rows_error(call: str, key: Hashable, stored: int, wanted: int) -> PoolArgumentError:
    """Make the error for a key that is stored with another number of rows."""
    return PoolArgumentError(
        f"{call}: {named(key)} is stored with {stored} rows and wanted with {wanted}; two contents share a key, or an "
        "item's offsets are wrong; correct the key, or drop what is stored"
    )


def capture_error(call: str) -> PoolCaptureError:
    """Make the error for a call inside a capture."""
    return PoolCaptureError(
        f"{call} can't run inside a CUDA-graph capture: a replay would neither wait nor count again; do it before or "
        "after, and capture only what reads the pool's tensor"
    )


def named(key: Hashable) -> str:
    """Name a key in an error."""
    text = repr(key)
    return f"the key {text if len(text) <= 80 else text[:77] + '...'}"


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
