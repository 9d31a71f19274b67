"""What an encoder must say of itself to be captured, and what is asked of it: sizes, inputs, results.

An adapter is the user's own code, so whatever it answers is looked at before it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from .buckets import Bucket
from .errors import AdapterError, SpecError

__all__ = ["EncoderAdapter", "check_adapter", "checked_results", "checked_sizes"]

# More than any item has, and few enough that sums of them are integers of 64 bits.
_LARGEST = 1 << 48


class EncoderAdapter(Protocol):
    """An encoder as `CapturedEncoder` takes it.

    Three more methods may be there:

    - `eager(items)` returns the outputs for items that no graph serves. Without it, it is
      `forward(**prepare(items, None))`.
    - `path(item)` names the mode of the encoder that an item goes through, which must be hashable. Items of different
      paths are never in one pack, and each path has graphs of its own: it is the manager's `variant`. What `forward`
      has to know of it is best given as an input that is a `constant()`.
    - `rows(item)` says how many rows the item's result has, an int. Each result is then checked.
    """

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Of each input of `forward` its specs, as `CaptureManager` takes them."""
        ...

    @property
    def outputs(self) -> Any:
        """The specs of what `forward` returns."""
        ...

    def sizes(self, item: Any) -> Mapping[str, int]:
        """An item's own sizes, by the names of the grid, as integers of the host.

        Derived sizes may be left out, where the rule by which they follow from the others covers every item. Sizes that
        rows or offsets have add up over the items of a pack; of others, such as a longest sequence, the largest counts.
        """
        ...

    def prepare(self, items: Sequence[Any], bucket: Bucket | None) -> Mapping[str, Any]:
        """The inputs of `forward` for a pack of items, one after the other, at the items' own sizes.

        This is where work of the host is done and uploads begin; it must not wait for the device.

        Args:
            items: at least one.
            bucket: the bucket that they are to be replayed in; None where `forward` is to run eagerly.
        """
        ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function that is captured. It is called with the inputs by name."""
        ...

    def split(self, outputs: Any, items: Sequence[Any]) -> Sequence[Any]:
        """One result for each item, in order, from the outputs for a pack."""
        ...


def check_adapter(adapter: Any) -> None:
    """Raises SpecError for an object that lacks what an adapter must have."""
    lacking = [name for name in ("inputs", "outputs") if not hasattr(adapter, name)]
    lacking += [
        f"{name}(...)"
        for name in ("sizes", "prepare", "forward", "split")
        if not callable(getattr(adapter, name, None))
    ]
    odd = [name for name in ("eager", "path", "rows") if not callable(getattr(adapter, name, len))]
    if odd:
        raise SpecError(f"{', '.join(odd)} of an adapter must be methods where there are any, on {adapter!r}")
    if isinstance(adapter, type) or lacking:
        what = (
            "an instance, got the class" if isinstance(adapter, type) else f"{', '.join(lacking)}, not found on"
        )
        raise SpecError(f"an encoder's adapter needs {what} {adapter!r}: see EncoderAdapter")


def checked_sizes(
    adapter: EncoderAdapter, item: Any, names: Sequence[str], derived: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    """An item's sizes in the order of the grid's names; 0 for a derived one that isn't said.

    Raises:
        AdapterError: names are missing or unknown, or a size isn't an integer of the host of zero or more.
    """
    sizes = adapter.sizes(item)
    if not isinstance(sizes, Mapping):
        raise AdapterError(
            f"sizes of {where} must be a mapping of names to integers, got {type(sizes).__name__}"
        )
    if not sizes.keys() <= set(names) or any(name not in sizes and name not in derived for name in names):
        needed = [name for name in names if name not in derived]
        missing = [name for name in needed if name not in sizes]
        unknown = [name for name in sizes if name not in names]
        raise AdapterError(
            f"sizes of {where} must name {needed}, and may name {list(derived)}: missing {missing}, unknown {unknown}"
        )
    return tuple(_size(sizes.get(name, 0), name, where) for name in names)


def _size(value: Any, name: str, where: str) -> int:
    if type(value) is not int:
        if isinstance(value, torch.Tensor):
            raise AdapterError(
                f"size {name!r} of {where} must be a Python int, got a tensor on {value.device}: keep sizes on the "
                "host beside the tensors, since reading one waits for the device"
            )
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise AdapterError(f"size {name!r} of {where} must be a Python int, got {value!r}") from None
    if not 0 <= value < _LARGEST:
        raise AdapterError(f"size {name!r} of {where} must be zero or more and below 2^48, got {value}")
    return int(value)


def checked_results(adapter: EncoderAdapter, outputs: Any, items: Sequence[Any], where: str) -> list[Any]:
    """The items' results, as many as there are items.

    Raises:
        AdapterError: another number of results, or one with other rows than `rows(item)` says.
    """
    results = adapter.split(outputs, items)
    if not isinstance(results, Sequence) or len(results) != len(items):
        came = f"{len(results)}" if isinstance(results, Sequence) else f"a {type(results).__name__}"
        raise AdapterError(
            f"split must give a sequence of one result for each of the {len(items)} items of {where}, got {came}"
        )
    rows = getattr(adapter, "rows", None)
    if rows is not None:
        for item, result in zip(items, results, strict=True):
            for tensor in _tensors(result):
                if tensor.dim() == 0 or tensor.shape[0] != rows(item):
                    raise AdapterError(
                        f"split gave a result of shape {list(tensor.shape)} for an item of {where} whose rows(item) is "
                        f"{rows(item)}: cut the outputs by the items' own rows"
                    )
    return list(results)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
