"""How features reach the encoder's device, and small index arrays the device.

Promises: on CUDA, features move on a side stream of the device, which waits for the stream that produced a
source that is resident on a device, and which the compute stream waits for; what was allocated on the side
stream is marked as used by the compute stream. Elsewhere none of this takes part. A pinned buffer comes from
torch's pinned allocator, which hands it out again only after the copies from it have ended.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.errors import FeatureError
from mmgraph.items import FeatureHandle, MultimodalDataItem, describe_item


class FeatureMover:
    """Moves tensors to devices; keeps one side stream for each CUDA device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def move(self, sources: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Bring tensors to a device; those that are there already are returned as they are.

        Args:
            sources: Tensors on any device, pinned or not.
            device: Where to.

        Returns:
            Tensors that the current stream of the device may use.
        """
        device = settled(device)
        if device.type != "cuda":
            return [source.to(device) for source in sources]
        if all(source.device == device for source in sources):
            return list(sources)
        compute = torch.cuda.current_stream(device)
        side = self._side_stream(device)
        for origin in {source.device for source in sources if source.is_cuda and source.device != device}:
            side.wait_stream(torch.cuda.current_stream(origin))
        with torch.cuda.stream(side):
            moved = [source if source.device == device else _start_copy(source, device) for source in sources]
        compute.wait_stream(side)
        for source, copy in zip(sources, moved, strict=True):
            if copy is not source:
                copy.record_stream(compute)
        return moved

    def move_features(self, features: Sequence[Any], device: torch.device) -> list[Any]:
        """Bring all tensors inside features to a device, in one visit to the side stream.

        Args:
            features: Tensors, or lists, tuples and mappings that hold tensors; anything else is left as it is.
            device: Where to.

        Returns:
            Features of the same structure.
        """
        leaves: list[torch.Tensor] = []
        for feature in features:
            _collect(feature, leaves)
        moved = iter(self.move(leaves, device))
        return [_rebuild(feature, moved) for feature in features]

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        return stream


def settled(device: torch.device) -> torch.device:
    """Name a CUDA device by its index."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


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
            item.feature = handle.consume()
        item.feature = _as_tensors(item.feature)
    except Exception as error:
        what = "its handle can't be consumed" if handle is not None else "its feature can't become a tensor"
        raise FeatureError(f"{describe_item(item)}: {what}: {type(error).__name__}: {error}") from error
    return handle


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small host array to a device, without a stall on CUDA."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _start_copy(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    if (
        source.device.type != "cpu"
        or source.is_pinned()
        or source.requires_grad
        or source.layout != torch.strided
    ):
        return source.to(device, non_blocking=True)
    staged = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    staged.copy_(source)
    return staged.to(device, non_blocking=True)


def _as_tensors(feature: Any) -> Any:
    if isinstance(feature, np.ndarray):
        native = feature.astype(feature.dtype.newbyteorder("="), copy=False)
        # torch takes neither negative strides nor read-only memory without a warning.
        return torch.from_numpy(np.require(native, requirements=["C", "W"]))
    if isinstance(feature, list | tuple):
        return [_as_tensors(part) for part in feature]
    if isinstance(feature, dict):
        return {name: _as_tensors(part) for name, part in feature.items()}
    return feature


def _collect(feature: Any, leaves: list[torch.Tensor]) -> None:
    if isinstance(feature, torch.Tensor):
        leaves.append(feature)
    elif isinstance(feature, list):
        for part in feature:
            _collect(part, leaves)
    elif isinstance(feature, dict):
        for part in feature.values():
            _collect(part, leaves)


def _rebuild(feature: Any, moved: Any) -> Any:
    if isinstance(feature, torch.Tensor):
        return next(moved)
    if isinstance(feature, list):
        return [_rebuild(part, moved) for part in feature]
    if isinstance(feature, dict):
        return {name: _rebuild(part, moved) for name, part in feature.items()}
    return feature
