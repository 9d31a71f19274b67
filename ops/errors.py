"""Every error that the ops raise, one class per kind; each message says what was expected, what came, and the remedy.

``OpError`` is the base. Nothing here is raised after a launch: an error leaves inputs, outputs and the device as they
were, so that the next good call works.
"""


class OpError(Exception):
    """Base of all errors that ``mmgraph.ops`` raises."""


class ArgumentError(OpError, ValueError):
    """An argument has the wrong type, shape, dtype, device or layout."""


class DataError(OpError):
    """The values inside a tensor are wrong (an index out of range, lengths that decrease)."""


class CountMismatchError(DataError):
    """The number of placeholders differs from the number of feature rows."""


class DeviceError(DataError):
    """A kernel recorded an error that only device data could show; raised by ``check_errors``."""


class GradientError(OpError):
    """A gradient was asked of something that has none."""


class DuringCaptureError(OpError):
    """A call that can't be repeated by a graph was made while a stream is being captured."""


class BackendError(OpError):
    """Base of the errors about the choice of an attention backend."""


class UnknownBackend(BackendError, ValueError):
    """No backend has that name."""


class UnusableBackend(BackendError):
    """The backend exists but can't serve this call; the message lists the reason of each backend."""


class BrokenBackend(BackendError):
    """A backend's package is installed but can't be imported; it is never passed over quietly."""
