"""The shared static buffers: what each input looks like at each bucket, in one storage for all buckets.

Every bucket's static input is a contiguous view of the same flat storage, as large as the largest bucket needs,
so the memory is that of the largest bucket and not of the sum. Only one bucket's view is in use at a time: the
manager holds its lock from staging to the copy-out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .buckets import Bucket
from .errors import CallError, SpecError
from .spec import BucketSize, Constant, InputLeaf, Offsets, Rows, Spec, Static

__all__ = ["LeafLayout", "SharedBuffers", "example_for_bucket", "layout_of_example", "sizes_of_leaves"]

_OFFSET_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class LeafLayout:
    """What the tensors of one leaf must look like: `shape` leaves out the axis that the bucket sizes."""

    path: str
    spec: Spec
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]

    def length(self, sizes: Mapping[str, int]) -> int:
        """Rows along the sized axis (1 for a static leaf, which has none)."""
        if isinstance(self.spec, Rows):
            return sizes[self.spec.dim] // self.spec.per
        if isinstance(self.spec, Offsets):
            return sizes[self.spec.dim] + 1
        return 1

    def full_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape at the given sizes."""
        if isinstance(self.spec, Rows):
            axis = self.spec.axis
            return (*self.shape[:axis], self.length(sizes), *self.shape[axis:])
        if isinstance(self.spec, Offsets):
            return (self.length(sizes),)
        return self.shape

    def numel(self, sizes: Mapping[str, int]) -> int:
        """Elements of the tensor at the given sizes."""
        return math.prod(self.full_shape(sizes))


def layout_of_example(leaf: InputLeaf, value: Any, device: torch.device) -> LeafLayout | None:
    """The layout of one leaf, from its spec and an example; None for leaves that are not tensors.

    Raises:
        CallError: the example's leaf is not a tensor, on another device than the others, or does not fit
            what the spec says.
    """
    spec = leaf.spec
    if isinstance(spec, (BucketSize, Constant)):
        return None
    tensor = _require_tensor(leaf.path, value)
    if tensor.device != device:
        raise CallError(
            f"{leaf.path} is on {tensor.device}, other inputs are on {device}: put all inputs on one device"
        )
    shape = tuple(tensor.shape)
    if isinstance(spec, Rows):
        if tensor.dim() <= spec.axis:
            raise CallError(f"{leaf.path} must have rows along axis {spec.axis}, got shape {list(shape)}")
        shape = shape[: spec.axis] + shape[spec.axis + 1 :]
    elif isinstance(spec, Offsets):
        shape = ()
    layout = LeafLayout(
        leaf.path,
        spec,
        getattr(spec, "dtype", None) or tensor.dtype,
        device,
        shape if getattr(spec, "shape", None) is None else spec.shape,  # type: ignore[attr-defined]
    )
    if isinstance(spec, Rows):
        _check_fill(layout, spec.fill)
    if isinstance(spec, Offsets) and layout.dtype not in _OFFSET_DTYPES:
        raise SpecError(f"{leaf.path} holds offsets, which must be int32 or int64, got {layout.dtype}")
    check_leaf(layout, tensor)
    return layout


def _check_fill(layout: LeafLayout, fill: float) -> None:
    """Raises SpecError for a fill that the leaf's dtype would change or refuse."""
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        limit = torch.finfo(layout.dtype).max
        fits = not math.isfinite(fill) or abs(fill) <= limit
    elif layout.dtype == torch.bool:
        fits = fill in (0, 1)
    else:
        info = torch.iinfo(layout.dtype)
        fits = math.isfinite(fill) and fill == int(fill) and info.min <= fill <= info.max
    if not fits:
        raise SpecError(
            f"{layout.path} is {layout.dtype}, which cannot hold the fill {fill!r}: choose another fill"
        )


def check_leaf(layout: LeafLayout, value: Any) -> torch.Tensor:
    """The value as a tensor of the layout.

    Raises:
        CallError: not a tensor, or of another dtype, device, or trailing shape.
    """
    tensor = _require_tensor(layout.path, value)
    if tensor.dtype != layout.dtype:
        raise CallError(f"{layout.path} must be {layout.dtype}, got {tensor.dtype}")
    if tensor.device != layout.device:
        raise CallError(f"{layout.path} must be on {layout.device}, got {tensor.device}")
    shape = tuple(tensor.shape)
    spec = layout.spec
    if isinstance(spec, Rows):
        axis = spec.axis
        if len(shape) != len(layout.shape) + 1 or shape[:axis] + shape[axis + 1 :] != layout.shape:
            expected = [*layout.shape[:axis], spec.dim, *layout.shape[axis:]]
            raise CallError(
                f"{layout.path} must have shape [{', '.join(map(str, expected))}], got {list(shape)}"
            )
    elif isinstance(spec, Offsets):
        if len(shape) != 1 or shape[0] < 1:
            raise CallError(f"{layout.path} must have shape [{spec.dim} + 1], got {list(shape)}")
    elif shape != layout.shape:
        raise CallError(f"{layout.path} must have shape {list(layout.shape)} in every call, got {list(shape)}")
    return tensor


def _require_tensor(path: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{path} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        raise CallError(
            f"{path} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}"
        )
    return value


def sizes_of_leaves(inputs: Sequence[InputLeaf], leaves: Sequence[Any]) -> dict[str, int]:
    """The call's named sizes, read off shapes and Python ints (nothing is read from the device).

    Raises:
        CallError: two leaves that give one size differently, or a size that is not a Python int of zero or
            more.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for leaf, value in zip(inputs, leaves, strict=True):
        spec = leaf.spec
        if isinstance(spec, Rows):
            tensor = _require_tensor(leaf.path, value)
            if tensor.dim() <= spec.axis:
                raise CallError(
                    f"{leaf.path} must have rows along axis {spec.axis}, got shape {list(tensor.shape)}"
                )
            dim, size = spec.dim, tensor.shape[spec.axis] * spec.per
        elif isinstance(spec, Offsets):
            tensor = _require_tensor(leaf.path, value)
            if tensor.dim() != 1 or tensor.shape[0] < 1:
                raise CallError(f"{leaf.path} must have shape [{spec.dim} + 1], got {list(tensor.shape)}")
            dim, size = spec.dim, tensor.shape[0] - 1
        elif isinstance(spec, BucketSize):
            dim, size = spec.dim, _host_int(leaf.path, value)
        else:
            continue
        if sizes.setdefault(dim, size) != size:
            raise CallError(f"{leaf.path} gives {dim}={size}, but {origin[dim]} gives {dim}={sizes[dim]}")
        origin.setdefault(dim, leaf.path)
    return sizes


def _host_int(path: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        raise CallError(
            f"{path} must be a Python int, got a tensor on {value.device}: reading it would wait for the device; "
            "keep the size on the host beside the tensor"
        )
    try:
        if isinstance(value, bool):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise CallError(f"{path} must be a Python int, got {value!r}") from None
    if size < 0:
        raise CallError(f"{path} must be zero or more, got {size}")
    return size


def example_for_bucket(
    layout: LeafLayout, example: torch.Tensor, bucket: Bucket, within: Mapping[str, str], *, fits: bool
) -> torch.Tensor:
    """Values for one leaf at a bucket's full sizes, for warm-up and capture.

    Rows repeat the example's rows, so that they are values the function can meet (integers only where `fits`:
    the bucket holds the whole example); offsets cut the bucket's rows into its number of sequences, as evenly
    as its longest sequence allows.
    """
    spec = layout.spec
    if isinstance(spec, Offsets):
        total, count = bucket[spec.of], bucket[spec.dim]
        longest = min((bucket[inner] for inner, outer in within.items() if outer == spec.of), default=total)
        step = min(longest, -(-total // count)) if count else 0
        cuts = [min(index * step, total) for index in range(count + 1)]
        return torch.tensor(cuts, dtype=layout.dtype, device="cpu").to(layout.device)
    if isinstance(spec, Static):
        return example
    if not isinstance(spec, Rows):
        raise SpecError(f"{layout.path} has no rows to repeat")
    wanted, have = layout.length(bucket), example.shape[spec.axis]
    # Integers may point at other rows, of which a smaller bucket has fewer than the example; the fill is a
    # value that the function must take anyway.
    if have == 0 or not (fits or layout.dtype.is_floating_point or layout.dtype.is_complex):
        return torch.full(layout.full_shape(bucket), spec.fill, dtype=layout.dtype, device=layout.device)
    index = torch.arange(wanted, device=layout.device) % have
    return example.index_select(spec.axis, index)


class SharedBuffers:
    """One flat storage per leaf, and each bucket's contiguous view of it.

    Args:
        layouts: of the tensors; None where a leaf is no tensor.
        buckets: every bucket that a view may be asked for.
    """

    def __init__(self, layouts: Sequence[LeafLayout | None], buckets: Sequence[Bucket]) -> None:
        self._layouts = tuple(layouts)
        self._flat: list[torch.Tensor | None] = []
        for layout in self._layouts:
            if layout is None:
                self._flat.append(None)
                continue
            numel = max(layout.numel(bucket) for bucket in buckets)
            # Zeros, not empty: the padding of the first replay must not depend on what the allocator held
            # before. And ordinary tensors even under inference mode: later calls write them, in whatever mode
            # they come.
            with torch.inference_mode(False):
                self._flat.append(torch.zeros(numel, dtype=layout.dtype, device=layout.device))

    def holds(self, bucket: Bucket) -> bool:
        """Whether every storage is large enough for a bucket."""
        return all(
            layout is None or flat is None or layout.numel(bucket) <= flat.numel()
            for layout, flat in zip(self._layouts, self._flat, strict=True)
        )

    def flat(self, position: int) -> torch.Tensor:
        """The whole storage of a leaf, as one row of elements."""
        flat = self._flat[position]
        if flat is None:
            raise SpecError(f"leaf {position} is not a tensor and has no buffer")
        return flat

    @property
    def storages(self) -> list[torch.Tensor]:
        """The flat tensors."""
        return [flat for flat in self._flat if flat is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages together."""
        return sum(flat.numel() * flat.element_size() for flat in self.storages)

    def view(self, position: int, bucket: Bucket) -> torch.Tensor:
        """The contiguous view of one leaf at a bucket's sizes."""
        layout, flat = self._layouts[position], self.flat(position)
        if layout is None:
            raise SpecError(f"leaf {position} is not a tensor and has no buffer")
        with torch.inference_mode(False):
            return flat[: layout.numel(bucket)].view(layout.full_shape(bucket))
