"""The device-side error flag: kernels record what only device data can show; ``check_errors`` reads it later.

A device assert would kill the process's CUDA context, and reading a result would synchronise. So each device has one
small tensor, made at first use, never freed (captured graphs keep writing to its address), with three numbers per kind
of fault: how often it was seen, and the row and value of the one seen first.
"""

import enum
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mmgraph.ops.errors import DeviceError, DuringCaptureError


class Fault(enum.IntEnum):
    """Kinds of fault that a kernel can record; the value is the fault's place in the flag."""

    ASSEMBLE_ROW = 0
    ASSEMBLE_ID = 1
    DEEPSTACK_ROW = 2
    MERGE_COUNT = 3
    ATTENTION_OFFSETS = 4
    STORE_ROW = 5
    RANGES = 6
    MIX_INDEX = 7


FIELDS = 3  # count, row, value

_MESSAGES = {
    Fault.ASSEMBLE_ROW: (
        "assemble_embeddings: a row map value was outside the pool: row {row} had {value} ({count} such rows). "
        "Values are -1 for text or an index below the pool's rows. Those rows came out as zeros."
    ),
    Fault.ASSEMBLE_ID: (
        "assemble_embeddings: strict=True found a token id outside the vocabulary at a row that no pool row covers: "
        "row {row} had id {value} ({count} such rows). The nearest vocabulary row was taken (zeros if the table is "
        "empty). Cover the row, correct the id, or call with strict=False."
    ),
    Fault.DEEPSTACK_ROW: (
        "deepstack_add: a row map value was outside the pool: row {row} had {value} ({count} such rows). Values are "
        "-1 for no row or an index below the pool's rows. Nothing was added to those rows."
    ),
    Fault.MERGE_COUNT: (
        "merge_embeddings: the mask held {row} placeholders but there were {value} feature rows. Give exactly one "
        "feature row per placeholder. Placeholders without a feature row came out as zeros."
    ),
    Fault.ATTENTION_OFFSETS: (
        "varlen_attention: cu_seqlens doesn't fit: sequence {row} has {value} rows by its offsets ({count} such "
        "sequences). Offsets start at 0, never decrease and end within the tokens; no length passes max_seqlen."
    ),
    Fault.STORE_ROW: (
        "store_rows: a place was outside the buffer: row {row} had {value} ({count} such rows). Places are -1 for "
        "nowhere or an index below the buffer's rows. Those rows were not stored."
    ),
    Fault.RANGES: (
        "expand_ranges: ranges must ascend, not overlap, end inside the rows and have sources of 32 bits that aren't "
        "negative: range {row} begins at {value} "
        "({count} such blocks of ranges). Unused ranges go last and begin at 2^31 - 1."
    ),
    Fault.MIX_INDEX: (
        "mix_rows: an index was outside the table: token {row} had {value} ({count} such tokens). Indices are rows "
        "of the table; a tap that isn't used has an index of the table and the weight 0. Those taps added nothing."
    ),
}

_flags: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()


def flag_for(device: torch.device) -> torch.Tensor:
    """The flag of a device (one with an index), int64 ``[len(Fault) * FIELDS]``.

    Raises:
        DuringCaptureError: It isn't made yet and the current stream is being captured.
    """
    flag = _flags.get(device)
    if flag is not None:
        return flag
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            f"the error flag of {device} must exist before a capture, but this is the first mmgraph op on that device "
            "and it runs inside one. Run the function once before capturing it, or call "
            f"mmgraph.ops.prepare_device({str(device)!r}) first."
        )
    with _lock:
        if device not in _flags:
            # On a thread of its own, whose allocations are always the process's. The caller's may be going to the pool
            # of a graph: with mode="reduce-overhead" the first call of a compiled function runs there, and PyTorch
            # refuses what then stays. Inference mode and traces are the caller's own, too.
            with ThreadPoolExecutor(max_workers=1) as elsewhere:
                _flags[device] = elsewhere.submit(_make_flag, device).result()
        return _flags[device]


def _make_flag(device: torch.device) -> torch.Tensor:
    made = torch.zeros(len(Fault) * FIELDS, dtype=torch.int64, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams may use it at once
    return made


def prepare_device(device: torch.device | str) -> None:
    """Make the error flag of a device now, so that the first op on it may run inside a capture.

    Args:
        device: The device; a CUDA device without an index is the current one.

    Raises:
        DuringCaptureError: The current stream is being captured.
    """
    flag_for(_with_index(torch.device(device)))


def check_errors(device: torch.device | str | None = None) -> None:
    """Raise what kernels recorded since the last call, and clear it; what they record meanwhile is for the next call.

    Synchronises the current stream of each device looked at: call it where the results are read anyway. It sees work
    that the current stream has waited for.

    Args:
        device: The device to look at; None for every device on which an op has run.

    Raises:
        DeviceError: A kernel recorded a fault; the message names the op, the row and the value.
        DuringCaptureError: The current stream is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise DuringCaptureError(
            "check_errors reads the device and can't run inside a capture: call it after the replay."
        )
    devices = list(_flags) if device is None else [_with_index(torch.device(device))]
    found: list[str] = []
    for one in devices:
        flag = _flags.get(one)
        if flag is None:
            continue
        values = _take(flag)
        for fault in Fault:
            count, row, value = values[fault * FIELDS : (fault + 1) * FIELDS]
            if count:
                found.append(f"{one}: " + _MESSAGES[fault].format(count=count, row=row, value=value))
    if found:
        raise DeviceError("\n".join(found))


def _take(flag: torch.Tensor) -> list[int]:
    """What the flag holds, and take the counts away from it.

    They are subtracted, by an atomic addition, and not set to zero: a kernel on another stream may count meanwhile. The
    row and value stay, unused at a count of zero, and are those of the earlier fault if one was counted meanwhile.
    """
    with _lock:  # two threads would take the same counts away twice
        seen = flag.clone()
        values: list[int] = seen.tolist()
        if any(values[::FIELDS]):
            places = torch.arange(0, len(values), FIELDS, device=flag.device)
            flag.index_add_(0, places, seen[places], alpha=-1)
            if flag.is_cuda:
                torch.cuda.current_stream(flag.device).synchronize()  # the next thread's may be another stream
    return values


def _with_index(device: torch.device) -> torch.device:
    if device == torch.device("cuda"):  # no index given
        return torch.device("cuda", torch.cuda.current_device())
    return device
