"""Named ranges around the embedder's phases, for torch's profiler and for NVTX.

Promises: where nobody listens no range is made; a phase ``p`` is called ``mmgraph.embed.p``.
"""

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.autograd import profiler

from mmgraph.errors import OptionError

RangeKind = Literal["profiler", "nvtx"]


def checked_kind(kind: RangeKind | None) -> RangeKind | None:
    """Give the kind of ranges that was asked for, after a check.

    Raises:
        OptionError: An unknown kind, or NVTX without CUDA.
    """
    if kind not in (None, "profiler", "nvtx"):
        raise OptionError(f"ranges must be None, 'profiler' or 'nvtx', got {kind!r}")
    if kind == "nvtx" and not torch.cuda.is_available():
        raise OptionError(
            "ranges='nvtx' needs CUDA, and torch sees no CUDA device; use 'profiler', or None for ranges whenever "
            "torch's profiler is on"
        )
    return kind


def phase_range(phase: str, kind: RangeKind | None) -> AbstractContextManager[Any] | None:
    """Make the range of a phase.

    Args:
        phase: Its name.
        kind: "profiler": a `torch.profiler.record_function` in any case, for whatever observes those. "nvtx": an NVTX
            range. None: a ``record_function`` while torch's profiler is on.

    Returns:
        The range, to be entered once; None where nobody listens.
    """
    if kind == "nvtx":
        nvtx: AbstractContextManager[Any] = torch.cuda.nvtx.range(f"mmgraph.embed.{phase}")
        return nvtx
    if kind == "profiler" or profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"mmgraph.embed.{phase}")
    return None
