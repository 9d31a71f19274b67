"""Where the tensors of a feature lie in one segment, and how their bytes are read and written.

Promises: a feature comes back with the structure, dtypes, shapes and bytes that it had, contiguous and without a
gradient, arrays as tensors and enums as the plain value that they are; what can't come back so is refused before
anything is published. A layout holds no tensor and needs no torch to be pickled. A place that doesn't fit its tensor
or its segment is an error before any memory is taken for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmgraph.errors import FeatureNotPublishableError, TransportError

if TYPE_CHECKING:
    import torch

# Tensors begin at cache lines: copies of whole lines are faster.
_ALIGNMENT = 64
# What goes into a pickle as it is, and the way from a subclass to it: a subclass may not be there to unpickle.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
_MAX_DEPTH = 64
_OTHER = object()


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's place in a segment.

    Attributes:
        dtype: Name of a torch dtype, such as ``"bfloat16"``.
        shape: Its shape.
        offset: Bytes before it.
        nbytes: Its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout:
    """The layout of a feature that is to be published.

    Args:
        feature: A tensor or array, or lists, tuples and mappings of these and of plain values, 64 deep at most.

    Raises:
        FeatureNotPublishableError: It holds something else, or a tensor that isn't dense and with data; or it is
            deeper, as one that holds itself is.
    """

    def __init__(self, feature: Any) -> None:
        self.nbytes = 0
        """Size of the segment, gaps between tensors included."""
        self._sources: list[tuple[TensorPlace, Any]] = []
        self.tree = self._placed(feature, "feature")
        """The feature with a `TensorPlace` for each tensor."""
        if not self._sources:
            raise FeatureNotPublishableError(
                f"a feature to publish must hold a tensor or an array, got {type(feature).__name__} without any; "
                "send it as it is"
            )

    def parts(self) -> Iterator[tuple[int, memoryview]]:
        """Give offset and bytes of each tensor; those on a device are copied to the host one at a time."""
        for place, source in self._sources:
            if place.nbytes:
                yield (
                    place.offset,
                    _array_bytes(source) if isinstance(source, np.ndarray) else _tensor_bytes(source),
                )

    def _placed(self, feature: Any, where: str, depth: int = 0) -> Any:
        plain = _plain_value(feature)
        if plain is not _OTHER:
            return plain
        if type(feature) in (list, tuple):
            self._check_depth(depth, feature)
            return type(feature)(
                self._placed(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(feature)
            )
        if isinstance(feature, Mapping):
            self._check_depth(depth, feature)
            placed: dict[Any, Any] = {}
            for key, part in feature.items():
                plain = _plain_value(key)
                if plain is _OTHER:
                    raise _refusal(where, f"keys that are plain values, got one of type {type(key).__name__}")
                if plain in placed:
                    raise _refusal(where, f"keys that differ as plain values, got {plain!r} twice")
                placed[plain] = self._placed(part, f"{where}[{plain!r}]", depth + 1)
            return placed
        dtype, shape, nbytes = _described(feature, where)
        place = TensorPlace(dtype, shape, -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT, nbytes)
        self.nbytes = place.offset + nbytes
        self._sources.append((place, feature))
        return place

    @staticmethod
    def _check_depth(depth: int, feature: Any) -> None:
        if depth >= _MAX_DEPTH:
            raise _refusal(
                "a feature",
                f"lists, tuples and mappings at most {_MAX_DEPTH} deep, got a {type(feature).__name__} that is deeper; "
                "does it hold itself? Flatten it",
            )


def map_places(
    tree: Any, of: Callable[[TensorPlace], Any], plain: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Rebuild a feature's structure with ``of`` of each tensor's place and ``plain`` of each plain value."""
    if isinstance(tree, TensorPlace):
        return of(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(map_places(part, of, plain) for part in tree)
    if isinstance(tree, dict):
        return {key: map_places(part, of, plain) for key, part in tree.items()}
    return plain(tree)


def dtype_of(place: TensorPlace) -> "torch.dtype":
    """Give a tensor's dtype.

    Raises:
        TransportError: This torch doesn't have it.
    """
    import torch

    dtype = getattr(torch, place.dtype, None) if isinstance(place.dtype, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TransportError(
            f"a tensor was published with dtype {place.dtype}, which torch {torch.__version__} doesn't have; "
            "run one version of torch in producers and consumers"
        )
    return dtype


def read_tensor(place: TensorPlace, read_into: Callable[[int, memoryview], None], size: int) -> "torch.Tensor":
    """Copy a tensor out of a segment: into pinned memory where there is CUDA.

    Args:
        place: Where it lies.
        read_into: Fills a buffer with the segment's bytes from an offset on.
        size: Bytes of the segment.

    Raises:
        TransportError: The place is none that was published, or this torch doesn't have its dtype.
    """
    import torch

    dtype = dtype_of(place)
    _check_place(place, dtype.itemsize, size)
    # By name: a default device has no say in where a host copy lies.
    pin = torch.cuda.is_available()
    tensor = torch.empty(place.shape, dtype=dtype, device="cpu", pin_memory=pin)
    if place.nbytes:
        read_into(place.offset, _tensor_bytes(tensor))
    return tensor


def _check_place(place: TensorPlace, itemsize: int, size: int) -> None:
    """Refuse what `Layout` never makes, since it came in a pickle."""
    shape = place.shape if isinstance(place.shape, tuple) else (None,)
    counts = (*shape, place.offset, place.nbytes)
    if (
        not all(type(count) is int and count >= 0 for count in counts)
        or place.nbytes != math.prod(place.shape) * itemsize
        or place.offset + place.nbytes > size
        # Strides must fit their integers too, of tensors without elements as well.
        or math.prod(max(length, 1) for length in place.shape) >= 2**63
        or place.dtype.startswith("q")
    ):
        raise TransportError(
            f"a {place.dtype} tensor of shape {place.shape} can't lie in {place.nbytes} bytes from byte {place.offset} "
            f"of a segment of {size}; handles are made by publish() and by nothing else"
        )


def _plain_value(value: Any) -> Any:
    """Give a plain value without its subclass, or ``_OTHER`` for anything else."""
    kind = type(value)
    if value is None or kind is bool or kind in _PLAIN:
        return value
    if isinstance(value, np.generic) and kind is value.dtype.type:
        return value
    return next((bare(value) for base, bare in _PLAIN.items() if isinstance(value, base)), _OTHER)


def _described(feature: Any, where: str) -> tuple[str, tuple[int, ...], int]:
    """Give the name of the torch dtype, the shape and the bytes of a tensor or array."""
    import torch

    if isinstance(feature, torch.Tensor):
        if type(feature) not in (torch.Tensor, torch.nn.Parameter):
            raise _refusal(where, f"a plain tensor, got one of type {type(feature).__name__}")
        if feature.layout != torch.strided or feature.is_meta or feature.is_quantized or feature.is_nested:
            unusual = "meta" if feature.is_meta else f"{feature.layout}, {feature.dtype}"
            raise _refusal(where, f"a dense tensor with data that isn't quantized, got {unusual}")
        return str(feature.dtype).removeprefix("torch."), tuple(feature.shape), feature.nbytes
    if not isinstance(feature, np.ndarray) or isinstance(feature, np.ma.MaskedArray):
        raise _refusal(
            where,
            "a tensor, an array, a list, tuple or mapping of these, a number, text, bytes or None, got "
            f"{type(feature).__module__}.{type(feature).__qualname__}",
        )
    try:
        dtype = torch.from_numpy(np.empty(0, feature.dtype.newbyteorder("="))).dtype
    except TypeError:
        raise _refusal(where, f"an array of a dtype that tensors have, got {feature.dtype}") from None
    return str(dtype).removeprefix("torch."), feature.shape, feature.nbytes


def _tensor_bytes(tensor: "torch.Tensor") -> memoryview:
    """View a tensor's bytes, of a host copy in rows where it isn't one itself."""
    import torch

    # As numbers of the same size first, since torch copies not every dtype, nor bit for bit.
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, tensor.dtype)
    host = tensor.detach().resolve_conj().resolve_neg().view(word).cpu().contiguous()
    # Not reshape(): a single element may keep a stride of 0, which can't be viewed as bytes.
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy().data


def _array_bytes(array: Any) -> memoryview:
    native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return native.reshape(-1).view(np.uint8).data


def _refusal(where: str, expected: str) -> FeatureNotPublishableError:
    return FeatureNotPublishableError(f"{where} can't be published: expected {expected}")
