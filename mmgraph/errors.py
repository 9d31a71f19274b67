"""Every error that mmgraph raises on purpose, in one place.

The data model, the plan and the embedder raise subclasses of `MultimodalError`, the encoder attention subclasses of
`EncoderAttentionError`. ``mmgraph.ops`` and
``mmgraph.capture`` own their errors; this module hands those out too, imported at first use, so that importing
the data model stays cheap.
"""

import importlib
from typing import Any


class MultimodalError(Exception):
    """Base of the errors of data model, plan and embedder.

    Args:
        message: What was expected, what came, and how to put it right.
        request: Index in the batch of the request to blame, where there is one.
    """

    def __init__(self, message: str, *, request: int | None = None) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args, self.__dict__)


class InputsError(MultimodalError, ValueError):
    """An item is malformed: its modality, hash, pad value, offsets or feature."""


class ContextError(MultimodalError, ValueError):
    """The lists of a forward context don't fit each other or ``input_ids``."""


class AliasError(MultimodalError, ValueError):
    """Two items share modality and hash but not the number of tokens."""


class MissingEncoderError(MultimodalError, ValueError):
    """The plan needs an encoder that the call didn't give, for an item to encode."""


class EncoderSpecError(MultimodalError, ValueError):
    """An encoder, or the model beside it, isn't what the embedder can call."""


class OptionError(MultimodalError, ValueError):
    """An option of a call is none of its choices."""


class MissingFeatureError(MultimodalError, ValueError):
    """An item has to be encoded and has no feature."""


class EvictedError(MissingFeatureError):
    """An item's rows were evicted from a pool or cache, and its feature was dropped when it was encoded."""


class FeatureError(MultimodalError, RuntimeError):
    """A feature can't be brought to the encoder's device, or a handle can't be consumed."""


class EncoderFailedError(MultimodalError, RuntimeError):
    """An encoder raised; the exception it raised is the ``__cause__``."""


class EncoderOutputError(MultimodalError, ValueError):
    """An encoder, or ``separate_deepstack_embeds``, returned rows of the wrong number, width or type."""


class RowsError(MultimodalError, ValueError):
    """Rows kept on an item are missing or don't fit the item or the text embedding."""


class LookupInputError(MultimodalError, ValueError):
    """``input_ids`` or the text embedding is not what the embedder can look up."""


class TransportError(MultimodalError, RuntimeError):
    """Shared memory can't be used: the system refuses, or a handle isn't one that was published."""


class FeatureNotPublishableError(TransportError, ValueError):
    """A feature holds something that shared memory can't carry."""


class SharedMemoryFullError(TransportError):
    """There is no room in shared memory for a feature."""


class SegmentGoneError(TransportError):
    """The shared memory of a handle was consumed, released or swept before the handle was attached."""


class SegmentDamagedError(TransportError):
    """The shared memory of a handle isn't as it was published."""


class HandleStateError(TransportError):
    """A handle was consumed without being attached, or used after it was consumed or released."""


class PoolError(MultimodalError):
    """Base of the errors of an encoder pool and of a row store."""


class PoolArgumentError(PoolError, ValueError):
    """An argument of a pool is of the wrong kind, or doesn't fit the pool or what is stored."""


class PoolFullError(PoolError, RuntimeError):
    """The wanted rows are more than what is free or can be evicted."""


class PoolStateError(PoolError, RuntimeError):
    """A call that the state of a lease or of a key doesn't allow."""


class PoolCaptureError(PoolStateError):
    """A call that belongs outside a CUDA-graph capture was made inside one."""


class PoolCopyError(PoolError, TypeError):
    """A pool or a lease was to be copied or pickled."""


class TowerError(ValueError):
    """A tower was given items, grids or options that it can't take."""


class GridError(TowerError):
    """Grids of patches are malformed, or lie where reading them would wait for a device."""


class UnsupportedModelError(TowerError):
    """A model, or a part of it, that an integration doesn't know how to make faster."""


class EncoderAttentionError(ValueError):
    """An encoder attention can't be made as asked, or a call's lengths or positions don't fit it.

    No `MultimodalError`: it blames no request, and torch.compile traces no exception with an ``__init__`` of its own,
    so that a compiled call would not say what is wrong.
    """


class EncoderCaptureError(EncoderAttentionError):
    """A call inside a capture or a traced graph would have to read, convert or move a tensor."""


class EncoderCheckpointError(EncoderAttentionError):
    """A checkpoint's projections don't fit an encoder attention."""


def __getattr__(name: str) -> Any:
    """Find the errors of ``mmgraph.capture`` and ``mmgraph.ops`` under this module too, in that order."""
    if not name.startswith("_"):
        for home in ("mmgraph.capture.errors", "mmgraph.ops.errors"):
            found = getattr(importlib.import_module(home), name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
