"""``RowMap``: which pool row each output row takes; built and checked on the host, copied without a stall.

Ranges are checked and overlaps resolved here, in numpy, so that the kernel is one gather. The device copy leaves from a
pinned buffer that isn't reused before the copy's event has passed.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.ops.errors import ArgumentError, DuringCaptureError

_SLOTS = 8
_SMALLEST = 4096


class _Slot:
    """A pinned buffer and the event that ends the last copy from it."""

    def __init__(self, rows: int) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty(rows, dtype=torch.int32, device="cpu", pin_memory=True)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()
        self.event = torch.cuda.Event()


class _PinnedRing:
    """Pinned buffers of one device; a buffer in flight is passed over, and waited for only when all are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []

    def copy(self, values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
        out = torch.empty(values.shape[0], dtype=torch.int32, device=device)
        with self._lock, torch.cuda.device(device):
            slot = self._take(values.shape[0])
            slot.array[: values.shape[0]] = values
            out.copy_(slot.tensor[: values.shape[0]], non_blocking=True)
            slot.event.record(torch.cuda.current_stream(device))
            self._slots.append(slot)  # newest last, so that the oldest copy is tried first
        return out

    def _take(self, rows: int) -> _Slot:
        for index, slot in enumerate(self._slots):
            if slot.event.query():
                del self._slots[index]
                return slot if slot.array.shape[0] >= rows else self._make(rows)
        if len(self._slots) < _SLOTS:
            return self._make(rows)
        slot = self._slots.pop(0)
        slot.event.synchronize()
        return slot if slot.array.shape[0] >= rows else self._make(rows)

    @staticmethod
    def _make(rows: int) -> _Slot:
        return _Slot(max(_SMALLEST, 1 << (rows - 1).bit_length()))


_rings: dict[torch.device, _PinnedRing] = {}
_rings_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """For each output row the pool row that it takes, or -1 for its text row.

    Attributes:
        host: int32 ``[num_rows]``, read-only.
        pool_rows: The number of pool rows that the values were checked against.
    """

    host: npt.NDArray[np.int32]
    pool_rows: int

    @classmethod
    def from_ranges(
        cls,
        num_rows: int,
        dst_start: npt.ArrayLike,
        dst_end: npt.ArrayLike,
        src_start: npt.ArrayLike,
        *,
        pool_rows: int,
    ) -> "RowMap":
        """Build the map from ranges; where ranges overlap, the later one wins.

        Args:
            num_rows: Rows of the output.
            dst_start: First output row of each range, int ``[ranges]``.
            dst_end: Last output row of each range, inclusive, int ``[ranges]``.
            src_start: Pool row that the range's first row takes, int ``[ranges]``; the next rows follow it.
            pool_rows: Rows of the pool.

        Returns:
            The frozen map.

        Raises:
            ArgumentError: Lengths differ, a range is empty or reversed, or a row is outside the output or the pool.
        """
        if not 0 <= num_rows < 2**31 or not 0 <= pool_rows < 2**31:
            raise ArgumentError(
                f"num_rows and pool_rows must be between 0 and 2^31 - 1, got {num_rows} and {pool_rows}."
            )
        first = _as_indices("dst_start", dst_start)
        last = _as_indices("dst_end", dst_end)
        source = _as_indices("src_start", src_start)
        if not first.shape == last.shape == source.shape:
            raise ArgumentError(
                "dst_start, dst_end and src_start must have one entry per range, got "
                f"{first.shape[0]}, {last.shape[0]} and {source.shape[0]}."
            )
        lengths = last - first + 1
        _check(first, last, lengths <= 0, "must not be empty: dst_end is inclusive and at least dst_start")
        _check(first, last, (first < 0) | (last >= num_rows), f"must lie inside the {num_rows} output rows")
        source_last = source + lengths - 1
        # By subtraction: the sum overflows for a source near the largest integer.
        outside = (source < 0) | (source > pool_rows - lengths)
        _check(source, source_last, outside, f"must lie inside the {pool_rows} pool rows", what="source")

        values = np.full(num_rows, -1, dtype=np.int32)
        if lengths.shape[0]:
            ends = np.cumsum(lengths)
            step = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
            # numpy keeps the last value where an index is repeated, which is the later range.
            values[np.repeat(first, lengths) + step] = np.repeat(source, lengths) + step
        values.setflags(write=False)
        return cls(values, pool_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the output."""
        return int(self.host.shape[0])

    def to(self, device: torch.device | str) -> torch.Tensor:
        """A copy on a device, int32 ``[num_rows]``; on CUDA enqueued on the current stream, without a stall.

        Args:
            device: Where to.

        Returns:
            A tensor of its own.

        Raises:
            DuringCaptureError: The current stream is being captured: the copy would be repeated from a reused buffer.
        """
        target = torch.device(device)
        if target.type != "cuda":
            return torch.from_numpy(self.host.copy()).to(target)
        if torch.cuda.is_current_stream_capturing():
            raise DuringCaptureError(
                "RowMap.to(device) can't run inside a capture: the graph would copy from a buffer that is reused. "
                "Copy it before the capture and pass the tensor."
            )
        if target == torch.device("cuda"):  # no index given
            target = torch.device("cuda", torch.cuda.current_device())
        if self.num_rows == 0:
            return torch.empty(0, dtype=torch.int32, device=target)
        with _rings_lock:
            ring = _rings.setdefault(target, _PinnedRing())
        return ring.copy(self.host, target)


def _as_indices(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{name} must be a one-dimensional integer array, got {array.dtype} {list(array.shape)}."
        )
    return array.astype(np.int64, copy=False)


def _check(
    first: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
    wrong: npt.NDArray[np.bool_],
    rule: str,
    *,
    what: str = "destination",
) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ArgumentError(f"a {what} range {rule}; range {index} is rows {first[index]} to {last[index]}.")
