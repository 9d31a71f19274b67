"""Every error that the capture room raises: what was expected, what came, and how to put it right."""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "BucketError",
    "CallError",
    "CallGradientError",
    "CaptureError",
    "CaptureFailedError",
    "MemoryBoundError",
    "MissError",
    "MissingPackageError",
    "NotCapturableError",
    "OutputError",
    "PaddingLeakError",
    "SpecError",
    "StaleLeaseError",
    "StaleWeights",
    "VerificationError",
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


class AdapterError(CaptureError, RuntimeError):
    """An encoder's adapter answered with sizes, inputs or results that don't fit the items; the message names them."""


class MissError(CaptureError, RuntimeError):
    """A call that no graph serves, where misses are errors (`on_miss="error"`).

    Attributes:
        reason: why, as `explain_call` says it.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MemoryBoundError(CaptureError, RuntimeError):
    """A graph would take more memory than `max_bytes` leaves.

    Attributes:
        fits_alone: whether there would be room for it if nothing else were captured.
    """

    def __init__(self, message: str, fits_alone: bool = False) -> None:
        super().__init__(message)
        self.fits_alone = fits_alone


class StaleLeaseError(CaptureError, RuntimeError):
    """A lease whose memory has been given to a later call."""


class VerificationError(CaptureError, RuntimeError):
    """A replay differs from the function on the same inputs."""


class MissingPackageError(CaptureError, ImportError):
    """A package that an optional extra brings is not installed.

    Args:
        package: the module that could not be imported; kept as `name`.
        extra: the extra of mmgraph that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f'this needs {package}, which is not installed: pip install "mmgraph[{extra}]"', name=package
        )


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


class PaddingLeakError(CaptureError, RuntimeError):
    """Real rows of an output depend on what lies in the padding: a call's results would depend on its bucket.

    Attributes:
        output: the path of the first such output.
        operation: the first operation that lets padding through and the line that calls it, where it is known.
        kind: the garbage that showed it: "nan", "large" or "moderate".
        inputs: the inputs whose padding shows it when no other's is garbage; empty if it takes several.
    """

    def __init__(
        self, message: str, output: str, operation: str | None, kind: str, inputs: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.output = output
        self.operation = operation
        self.kind = kind
        self.inputs = inputs


class StaleWeights(CaptureError, RuntimeError):
    """Weights that captured graphs read by address were replaced; the message names them and the remedies.

    Attributes:
        names: what is no longer what it was at capture.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names
