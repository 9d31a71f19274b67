"""Hashes of media contents, and placeholder ids made from them.

Promises: a content hash covers dtype, shape, partition and bytes, has 128 bits and is the same in every
process; a placeholder id is at least 1,000,000 and at most 2**31 - 2, and lies in an interval that belongs to
its modality alone. Imports numpy only; tensors are recognised without importing torch.
"""

import hashlib
import itertools
import operator
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from mmgraph.errors import InputsError
from mmgraph.modality import Modality

PAD_VALUE_MIN = 1_000_000
PAD_VALUE_MAX = 2**31 - 2

_WIDTH = (PAD_VALUE_MAX - PAD_VALUE_MIN + 1) // len(Modality)
# The last quarter of each interval is for items that are never shared, so that no hash can ever yield their
# ids.
_PRIVATE = _WIDTH // 4
_HASHED = _WIDTH - _PRIVATE
_FIRST = {modality: PAD_VALUE_MIN + index * _WIDTH for index, modality in enumerate(Modality)}


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def pad_value_interval(modality: Modality) -> range:
    """Give the placeholder ids that belong to a modality."""
    return range(_FIRST[modality], _FIRST[modality] + _WIDTH)


def pad_value_for_hash(hash: int | str | bytes, modality: Modality) -> int:
    """Make a placeholder id from an item's hash.

    Args:
        hash: An integer of any size and sign, text, or bytes.
        modality: Whose interval the id lies in.

    Returns:
        The same id in every process, for the same arguments.

    Raises:
        InputsError: The hash is of another type.
    """
    kind, data = _hash_bytes(hash)
    digest = hashlib.blake2b(kind + data, digest_size=8).digest()
    return _FIRST[modality] + int.from_bytes(digest, "little") % _HASHED


def private_pad_value(modality: Modality) -> int:
    """Make a placeholder id for an item that is never shared.

    No hash yields it, and this process does not hand it out again for the next 178 million items of all
    modalities. Processes start at random places, so that items which meet in one server after being made in
    others rarely clash.
    """
    return _FIRST[modality] + _HASHED + next(_private_numbers) % _PRIVATE


def content_hash(*values: Any) -> int:
    """Hash contents over their types, dtypes, shapes, partition and bytes.

    Args:
        *values: Tensors on any device, numpy arrays, numbers, text, bytes, None, Modality, and lists, tuples
            and mappings of these. A tensor and an array of the same contents hash alike. Tensors on a device
            are copied to the host, which waits for the device.

    Returns:
        An integer of 128 bits.

    Raises:
        InputsError: A value is of a type whose bytes are not defined.
    """
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, values)
    return int.from_bytes(digest.digest(), "little")


def _hash_bytes(hash: int | str | bytes) -> tuple[bytes, bytes]:
    if isinstance(hash, str):
        return b"s", hash.encode("utf-8", "surrogatepass")
    if isinstance(hash, bytes):
        return b"b", hash
    try:
        number = operator.index(hash)
    except TypeError:
        raise InputsError(
            f"a hash must be an int, str or bytes, or None for an item that is never shared; got {hash!r} "
            f"of type {type(hash).__name__}"
        ) from None
    return b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _feed(digest: _Digest, value: Any) -> None:
    """Feed one value, each part led by its kind and length, so that no two structures give the same bytes."""
    torch = sys.modules.get("torch")  # what isn't imported can't have made a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        name, shape, data = _tensor_bytes(torch, value)
        _feed_array(digest, name, shape, data)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names is not None:
            raise InputsError(
                f"can't hash an array of dtype {array.dtype}: use a numeric dtype, or give the item a hash"
            )
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        _feed_array(digest, array.dtype.name, array.shape, native.reshape(-1).view(np.uint8))
    elif value is None:
        digest.update(b"n;")
    elif isinstance(value, bool | float | complex | Modality):
        _feed_bytes(digest, b"p", repr(value).encode())
    elif isinstance(value, int | str | bytes):
        _feed_bytes(digest, *_hash_bytes(value))
    elif isinstance(value, list | tuple):
        digest.update(b"l%d;" % len(value))
        for part in value:
            _feed(digest, part)
    elif isinstance(value, Mapping):
        digest.update(b"m%d;" % len(value))
        for key in sorted(value, key=repr):
            _feed(digest, key)
            _feed(digest, value[key])
    else:
        raise InputsError(
            f"can't hash a value of type {type(value).__name__}: hash tensors, arrays, numbers, text and "
            "lists or mappings of these, or give the item a hash where it is made"
        )


def _feed_array(digest: _Digest, name: str, shape: tuple[int, ...], data: Any) -> None:
    digest.update(f"a{name}{tuple(shape)};".encode())
    digest.update(data)


def _feed_bytes(digest: _Digest, kind: bytes, data: bytes) -> None:
    digest.update(b"%s%d;" % (kind, len(data)))
    digest.update(data)


def _tensor_bytes(torch: Any, tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise InputsError(
            f"can't hash a tensor of layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}: "
            "use a dense tensor with data, or give the item a hash"
        )
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    return name, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy()


def _start_counting() -> None:
    global _private_numbers
    _private_numbers = itertools.count(secrets.randbelow(_PRIVATE))


_private_numbers: Iterator[int]
_start_counting()
os.register_at_fork(after_in_child=_start_counting)
