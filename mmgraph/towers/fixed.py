"""Encoders whose inputs all have one size: images of one height and width, crops, clips of sound.

`FixedEncoder` is an encoder adapter (`mmgraph.capture.CapturedEncoder`): an item is one row of each input, and a bucket
is a number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import BucketGrid, rows
from mmgraph.errors import TowerError

__all__ = ["FixedEncoder", "FixedInput", "FixedItem", "doubling", "stacked", "unstacked"]


@dataclass(frozen=True)
class FixedInput:
    """What an input of a fixed-size encoder is like.

    Attributes:
        shape: Of one item.
        dtype: What it is converted to.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class FixedItem:
    """One image or clip.

    Attributes:
        values: By the input's name, a tensor of the input's shape.
    """

    values: Mapping[str, Tensor]


class FixedEncoder:
    """An encoder adapter around a function of whole batches.

    Args:
        run: Takes the inputs by name, ``[items, *shape]`` each, and gives tensors by name that have a row for each
            item, ``[items, ...]``. It must be capturable.
        inputs: What it takes.
        outputs: The names of what it gives.
        device: Where it runs.
        unit: What an item is called in buckets and reports.
    """

    def __init__(
        self,
        run: Callable[..., Mapping[str, Tensor]],
        inputs: Mapping[str, FixedInput],
        outputs: Sequence[str],
        *,
        device: torch.device,
        unit: str = "images",
    ) -> None:
        self.unit, self.device = unit, device
        self._run, self._declared, self._names = run, dict(inputs), tuple(outputs)

    @property
    def inputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s inputs."""
        return {name: rows(self.unit) for name in self._declared}

    @property
    def outputs(self) -> dict[str, Any]:
        """The declaration of `forward`'s outputs."""
        return {name: rows(self.unit) for name in self._names}

    def sizes(self, item: FixedItem) -> dict[str, int]:
        """An item is one."""
        return {self.unit: 1}

    def example(self) -> FixedItem:
        """An item of zeros, to capture with."""
        return FixedItem(
            {
                name: torch.zeros(one.shape, dtype=one.dtype, device=self.device)
                for name, one in self._declared.items()
            }
        )

    def prepare(self, items: Sequence[FixedItem], bucket: Mapping[str, int] | None) -> dict[str, Any]:
        """The inputs of `forward` for some items; those that lie in a row, as they lie.

        Raises:
            TowerError: No items, or one of another shape.
        """
        if not items:
            raise TowerError("an encoder of fixed-size inputs needs at least one item: don't call it for none")
        made: dict[str, Any] = {}
        for name, declared in self._declared.items():
            parts = [item.values[name] for item in items]
            other = next((part for part in parts if tuple(part.shape) != declared.shape), None)
            if other is not None:
                raise TowerError(
                    f"{name} of each item must have the shape {list(declared.shape)}, got {list(other.shape)}: "
                    "items of another size need an encoder of their own"
                )
            made[name] = stacked(parts).to(self.device, declared.dtype)
        return made

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The function."""
        given = self._run(**inputs)
        return {name: given[name] for name in self._names}

    def split(self, outputs: Mapping[str, Tensor], items: Sequence[FixedItem]) -> list[dict[str, Tensor]]:
        """Each item's row of each output."""
        parts = {name: outputs[name].unbind(0) for name in self._names}
        return [{name: rows[index] for name, rows in parts.items()} for index in range(len(items))]

    def grid(self, largest: int) -> BucketGrid:
        """Buckets of 1, 2, 4 and so on to ``largest`` items."""
        sizes: dict[str, Any] = {self.unit: doubling(largest)}
        return BucketGrid(**sizes)


def doubling(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and so on, and the largest.

    Raises:
        TowerError: Less than 1.
    """
    if largest < 1:
        raise TowerError(f"the largest bucket must hold at least 1 item, got {largest}")
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if largest == 1 else (*sizes, largest)


def unstacked(batch: Mapping[str, Tensor]) -> list[FixedItem]:
    """The items of a batch, ``[items, ...]`` by name, without a copy."""
    rows_of = {name: values.unbind(0) for name, values in batch.items()}
    count = min((len(parts) for parts in rows_of.values()), default=0)
    return [FixedItem({name: parts[index] for name, parts in rows_of.items()}) for index in range(count)]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as rows of one: without a copy where they lie in a row already.

    Args:
        parts: At least one, of one shape, dtype and device.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.unsqueeze(0)
    count, storage = first.numel(), first.untyped_storage().data_ptr()
    for index, part in enumerate(parts):
        if (
            not part.is_contiguous()
            or part.is_neg()
            or part.dtype != first.dtype
            or part.device != first.device
            or part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != first.storage_offset() + index * count
        ):
            return torch.stack(list(parts))
    return first.as_strided((len(parts), *first.shape), (count, *first.stride()))
