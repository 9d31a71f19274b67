"""Every error that the capture room raises: what was expected, what came, and how to put it right."""

from __future__ import annotations

__all__ = [
    "BucketError",
    "CallError",
    "CallGradientError",
    "CaptureError",
    "CaptureFailedError",
    "NotCapturableError",
    "OutputError",
    "SpecError",
]


class CaptureError(Exception):
    """Base of all errors of `mmgraph.capture`."""


class BucketError(CaptureError, ValueError):
    """A bucket list or grid that cannot be: empty, unsorted, repeated or not positive sizes, unknown names."""


class SpecError(CaptureError, ValueError):
    """A declaration of inputs or outputs that does not fit itself, the grid, or the example."""


class CallError(CaptureError, ValueError):
    """A call whose arguments do not fit the declaration; the message names the argument."""


class CallGradientError(CaptureError, RuntimeError):
    """An input that needs a gradient was given while gradients are recorded: replays have none."""


class OutputError(CaptureError, RuntimeError):
    """The function returned something other than the declared outputs."""


class NotCapturableError(CaptureError, RuntimeError):
    """The function does something that a replay cannot repeat; the message names the operation and a remedy."""


class CaptureFailedError(CaptureError, RuntimeError):
    """A bucket could not be captured. The cause is chained; everything captured before still works.

    Attributes:
        bucket: the sizes of the bucket whose capture failed, or None outside a grid.
    """

    def __init__(self, message: str, bucket: object = None) -> None:
        super().__init__(message)
        self.bucket = bucket
