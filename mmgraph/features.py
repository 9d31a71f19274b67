"""What a feature may be, and how it becomes tensors where it lies.

Promises: an item is changed only once its feature has been read; what needs no change keeps its identity, so that a
copy of it can be told from a copy of something else.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mmgraph.errors import FeatureError
from mmgraph.items import FeatureHandle, MultimodalDataItem, describe_item


def is_handle(feature: Any) -> bool:
    """Tell whether a feature is a handle; tensors and arrays are told apart first, since asking a protocol is slow."""
    return not isinstance(feature, torch.Tensor | np.ndarray) and isinstance(feature, FeatureHandle)


def load_feature(item: MultimodalDataItem) -> FeatureHandle | None:
    """Turn an item's feature into tensors, where it lies.

    A handle is consumed and its tensor takes the handle's place on the item, so that a later failure loses
    nothing.

    Returns:
        The handle that was consumed, to be released once the item is encoded.

    Raises:
        FeatureError: The handle can't be consumed, or an array is of a dtype that tensors don't have.
    """
    if isinstance(item.feature, torch.Tensor):
        return None
    handle: FeatureHandle | None = item.feature if is_handle(item.feature) else None
    try:
        if handle is not None:
            consumed = handle.consume()
            if consumed is None:
                raise ValueError("consume() gave None instead of the feature")
            item.feature = consumed
        tensors = _as_tensors(item.feature)
        if tensors is not item.feature:
            item.feature = tensors
    except Exception as error:
        what = "its handle can't be consumed" if handle is not None else "its feature can't become a tensor"
        raise FeatureError(f"{describe_item(item)}: {what}: {type(error).__name__}: {error}") from error
    return handle


def mark_used(feature: Any) -> None:
    """Mark tensors of a feature on CUDA devices as used by the devices' current streams."""
    for leaf in leaves_of(feature):
        if leaf.is_cuda and leaf.layout == torch.strided:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))


def leaves_of(feature: Any) -> list[torch.Tensor]:
    """Give the tensors inside a feature that `load_feature` has brought into form, in order."""
    if isinstance(feature, torch.Tensor):
        return [feature]
    if isinstance(feature, list):
        return [leaf for part in feature for leaf in leaves_of(part)]
    if isinstance(feature, dict):
        return [leaf for part in feature.values() for leaf in leaves_of(part)]
    return []


def rebuilt(feature: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """Give a feature of the same structure with other tensors, those of `leaves_of` in order."""
    if isinstance(feature, torch.Tensor):
        return next(leaves)
    if isinstance(feature, list):
        return [rebuilt(part, leaves) for part in feature]
    if isinstance(feature, dict):
        return {name: rebuilt(part, leaves) for name, part in feature.items()}
    return feature


def _as_tensors(feature: Any) -> Any:
    """Turn arrays into tensors and tuples into lists; what needs no change is given as it is."""
    if isinstance(feature, np.ndarray):
        native = feature.astype(feature.dtype.newbyteorder("="), copy=False)
        # torch takes neither negative strides nor read-only memory without a warning.
        return torch.from_numpy(np.require(native, requirements=["C", "W"]))
    if isinstance(feature, list | tuple):
        parts = [_as_tensors(part) for part in feature]
        same = isinstance(feature, list) and all(new is old for new, old in zip(parts, feature, strict=True))
        return feature if same else parts
    if isinstance(feature, dict):
        named = {name: _as_tensors(part) for name, part in feature.items()}
        return feature if all(named[name] is part for name, part in feature.items()) else named
    return feature
