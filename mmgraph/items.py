"""Media items: one image, video or audio clip of a prompt.

Promises: items are compared by identity; offsets are kept as they came and checked where they are used, so
that the error can name the request; an item always has a placeholder id unless told not to. Imports no torch.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from mmgraph.errors import InputsError
from mmgraph.fixed_list import FixedList
from mmgraph.hashing import content_hash, pad_value_for_hash, private_pad_value
from mmgraph.modality import Modality

Spans = FixedList[tuple[int, int]]

# Row maps are int32, so a prompt position beyond this can't be placed.
_MAX_POSITION = 2**31 - 2


@runtime_checkable
class FeatureHandle(Protocol):
    """A feature that lies elsewhere, such as in shared memory.

    ``consume`` gives the tensor and ends the handle; ``release`` gives the handle up without reading it, and
    does nothing where there is nothing left to give up.
    """

    def consume(self) -> Any:
        """Give the tensor, once."""

    def release(self) -> None:
        """Give the handle up; may be called any number of times."""


class MultimodalDataItem:
    """One image, video or audio clip of a prompt. Compared and hashed by identity.

    A copy of an item without a hash is another item, with a placeholder id of its own; a pickled one keeps its
    id, so that processes agree.

    Args:
        modality: A `Modality`, or its name.
        offsets: Inclusive ``(start, end)`` pairs of positions in the request's prompt, ascending, one per
            sub-grid, in the order of the encoder's rows. Read like a list; to change them, assign new ones.
        hash: An int of any size, text or bytes that names the contents; None: never shared with another item.
        pad_value: The placeholder id. "auto": made from the hash, or unique in the process while the hash is
            None. None: none, so that `pad_input_tokens` passes the item over.
        feature: What the encoder reads: a tensor on any device, an array, or a `FeatureHandle`. Dropped
            once the item is encoded.
        model_specific_data: Whatever else the encoder reads, such as a grid.
        encoded: Rows ``[num_tokens, hidden]``, written by the embedder, or given precomputed.
        encoded_deepstack: Rows ``[num_tokens, levels * hidden]`` for models with deepstack.

    Raises:
        InputsError: An unknown modality or a hash of the wrong type. Offsets are checked where they are used,
            so that the error can name the request.
    """

    __slots__ = (
        "__weakref__",
        "_hash",
        "_indexed",
        "_modality",
        "_num_tokens",
        "_offsets",
        "_pad",
        "_private_pad",
        "encoded",
        "encoded_deepstack",
        "feature",
        "model_specific_data",
        "share_key",
    )

    offsets_epoch: ClassVar[object] = object()
    """Replaced when the offsets of an item that an index already holds are assigned anew."""

    share_key: tuple[str, int | str | bytes] | None
    """What twins have in common: modality and hash; None for an item that is never shared."""

    def __init__(
        self,
        modality: Modality | str,
        offsets: Iterable[Sequence[int]] | None = None,
        hash: int | str | bytes | None = None,
        pad_value: int | Literal["auto"] | None = "auto",
        feature: Any = None,
        model_specific_data: dict[str, Any] | None = None,
        encoded: Any = None,
        encoded_deepstack: Any = None,
    ) -> None:
        self._indexed = False
        self._modality = _as_modality(modality)
        self._private_pad: int | None = None
        self._pad = pad_value
        self.hash = hash
        self.offsets = offsets
        self.feature = feature
        self.model_specific_data: dict[str, Any] = {} if model_specific_data is None else model_specific_data
        self.encoded = encoded
        self.encoded_deepstack = encoded_deepstack

    def __repr__(self) -> str:
        return f"MultimodalDataItem({describe_item(self)})"

    def __getstate__(self) -> Any:
        if self._hash is None and self._pad == "auto":
            _ = self.pad_value  # settle it, so that copies in other processes agree
        return super().__getstate__()

    def __copy__(self) -> "MultimodalDataItem":
        return self._copied(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MultimodalDataItem":
        return self._copied(lambda value: copy.deepcopy(value, memo), memo)

    def _copied(self, of: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> "MultimodalDataItem":
        """Make another item: it may get other contents, so an id of its own goes with it."""
        new = object.__new__(type(self))
        if memo is not None:
            memo[id(self)] = new
        for values in cast(tuple[dict[str, Any] | None, dict[str, Any]], super().__getstate__()):
            for name, value in (values or {}).items():
                setattr(new, name, of(value))
        new._private_pad = None
        new._indexed = False
        return new

    @property
    def modality(self) -> Modality:
        """The kind of media."""
        return self._modality

    @property
    def hash(self) -> int | str | bytes | None:
        """The name of the contents, or None where the item is never shared."""
        return self._hash

    @hash.setter
    def hash(self, value: int | str | bytes | None) -> None:
        if value is not None and not isinstance(value, str | bytes):
            try:
                value = operator.index(value)
            except TypeError:
                raise InputsError(
                    f"an item's hash must be an int, str, bytes or None, got {value!r} of type "
                    f"{type(value).__name__}"
                ) from None
        self._hash = value
        self.share_key = None if value is None else (self._modality.value, value)

    @property
    def pad_value(self) -> int | None:
        """The placeholder id of the item's positions."""
        if self._pad != "auto":
            return self._pad
        if self._hash is not None:
            return pad_value_for_hash(self._hash, self._modality)
        if self._private_pad is None:
            self._private_pad = private_pad_value(self._modality)
        return self._private_pad

    @pad_value.setter
    def pad_value(self, value: int | Literal["auto"] | None) -> None:
        self._pad = value

    @property
    def offsets(self) -> Spans:
        """The inclusive spans of the item in its prompt."""
        return self._offsets

    @offsets.setter
    def offsets(self, value: Iterable[Sequence[int]] | None) -> None:
        self._offsets = _as_spans(value)
        self._num_tokens: int | None = None
        if self._indexed:
            MultimodalDataItem.offsets_epoch = object()

    @property
    def num_tokens(self) -> int:
        """The sum of the spans, which is the number of the encoder's rows.

        Raises:
            InputsError: The offsets are malformed.
        """
        count = self._num_tokens
        if count is None:
            count = self._num_tokens = sum(end - start + 1 for start, end in checked_spans(self))
        return count

    def ensure_hash(self) -> int | str | bytes:
        """Give the hash, made from modality, feature and model-specific data where there is none yet.

        Call it before the prompt is padded: an automatic pad value follows the hash.

        Returns:
            The hash: as given, else an integer of 128 bits.

        Raises:
            InputsError: There is no feature, or one whose bytes can't be read here, such as a handle.
        """
        if self._hash is None:
            if self.feature is None:
                raise InputsError(
                    f"can't make a hash for {describe_item(self)}: it has no feature; "
                    "call ensure_hash() before the feature is dropped, or give the item a hash"
                )
            self.hash = content_hash(self._modality, self.feature, self.model_specific_data)
        return cast("int | str | bytes", self._hash)


def describe_item(item: Any, position: int | None = None, request: int | None = None) -> str:
    """Name an item in a message: where it stands, its modality, hash and spans."""
    place = [f"request {request}"] if request is not None else []
    if position is not None:
        place.append(f"item {position}")
    if not isinstance(item, MultimodalDataItem):
        return ", ".join([*place, f"an object of type {type(item).__name__}"])
    name = hex(item.hash) if isinstance(item.hash, int) else repr(item.hash)
    spans = ", ".join(str(span) for span in item.offsets[:4]) + (", ..." if len(item.offsets) > 4 else "")
    return ", ".join([*place, f"{item.modality.name} item (hash {name}, offsets [{spans}])"])


def checked_spans(item: MultimodalDataItem, position: int | None = None) -> Spans:
    """Give an item's offsets after checking them.

    Raises:
        InputsError: A span that isn't a pair of integers, is negative, empty or too far, or offsets that
            overlap or are out of order.
    """
    last = -1
    for span in item.offsets:
        if not (isinstance(span, tuple) and len(span) == 2 and type(span[0]) is int and type(span[1]) is int):
            raise InputsError(
                f"{describe_item(item, position)}: offsets must be a list of inclusive (start, end) pairs of "
                f"integers, such as [(3, 9)]; got {span!r} in it"
            )
        start, end = span
        if start < 0 or end > _MAX_POSITION:
            raise InputsError(
                f"{describe_item(item, position)}: span {span} must lie in positions 0 to {_MAX_POSITION} of "
                "the prompt"
            )
        if end < start:
            raise InputsError(
                f"{describe_item(item, position)}: span {span} is empty; both ends are inclusive, start first"
            )
        if start <= last:
            raise InputsError(
                f"{describe_item(item, position)}: span {span} begins at or before position {last}, where the "
                "span before it ends; an item's spans must ascend and not overlap, as the encoder's rows do"
            )
        last = end
    return item.offsets


def _as_modality(value: Modality | str) -> Modality:
    if isinstance(value, Modality):
        return value
    if isinstance(value, str) and value.lower() in (modality.value for modality in Modality):
        return Modality(value.lower())
    raise InputsError(f"modality must be one of {[modality.name for modality in Modality]}, got {value!r}")


def _as_spans(value: Any) -> Spans:
    """Bring offsets into the form that is checked later; what can't be brought there is left for the check."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        pairs = [] if value is None else list(value)
    except TypeError:
        pairs = [value]
    return FixedList(map(_as_pair, pairs), "item.offsets = [(start, end), ...]")


def _as_pair(pair: Any) -> Any:
    if hasattr(pair, "tolist"):
        pair = pair.tolist()
    return tuple(map(_as_int, pair)) if isinstance(pair, list | tuple) else pair


def _as_int(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value
