"""A call's arguments as the hot path reads them: what fits the declaration is read with few operations.

`CallReader.read` looks at each leaf once and gives None for a call that isn't exactly as declared; the slow path in
`layout.py` then says why, or takes it (tensor subclasses). `flat_binder` and `tree_builder` do without PyTorch's
pytrees where a declaration is made of plain dictionaries, lists and tuples.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .layout import LeafLayout
from .spec import BucketSize, Constant, Offsets, Rows, Signature

__all__ = ["PLAIN", "CallReader", "flat_binder", "tree_builder"]

#: Types whose memory is what it seems.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_MAYBE_CONJUGATED = frozenset((torch.complex32, torch.complex64, torch.complex128))

Source = tuple[int, int]


class CallReader:
    """Reads calls against known layouts.

    Args:
        signature: the declaration.
        layouts: of the input leaves.
    """

    def __init__(self, signature: Signature, layouts: Sequence[LeafLayout | None]) -> None:
        names = signature.grid.names
        self._blank = [-1] * len(names)
        self._ints: list[tuple[int, int]] = []
        self._tensors: list[tuple[Any, ...]] = []
        for position, (leaf, layout) in enumerate(zip(signature.inputs, layouts, strict=True)):
            spec = leaf.spec
            if isinstance(spec, BucketSize):
                self._ints.append((position, names.index(spec.dim)))
            elif isinstance(spec, Constant) or layout is None:
                continue
            else:
                self._tensors.append((position, *_as_read(layout, names)))
        self._divisors = [
            (names.index(spec.dim), spec.per)
            for spec in signature.outputs
            if isinstance(spec, Rows) and spec.per > 1
        ]

    def read(self, leaves: Sequence[Any]) -> tuple[list[int], list[Source | None]] | None:
        """A call's sizes and where its values lie; None where something isn't as declared.

        Returns:
            The sizes in the grid's order; and for each tensor leaf its address and bytes, or None where its memory
            isn't the contiguous one of its values along the first axis.
        """
        sizes = self._blank.copy()
        sources: list[Source | None] = []
        graded = torch.is_grad_enabled()
        try:
            for position, index, axis, per, less, dtype, device, shape, row_bytes, dims in self._tensors:
                value = leaves[position]
                if type(value) not in PLAIN or value.dtype is not dtype or value.device != device:
                    return None
                have = value.shape
                if graded and value.requires_grad:
                    return None
                if index < 0:
                    if have != shape or value.layout is not torch.strided:
                        return None
                    rows = 1
                elif axis == 0:
                    if (
                        len(have) != dims
                        or (dims > 1 and have[1:] != shape)
                        or value.layout is not torch.strided
                    ):
                        return None
                    rows = have[0]
                    size = rows * per - less
                    if size < 0:
                        return None
                else:
                    if len(have) != dims or have[:axis] + have[axis + 1 :] != shape:
                        return None
                    if value.layout is not torch.strided:
                        return None
                    rows = -1
                    size = have[axis] * per
                if index >= 0 and sizes[index] != size:
                    if sizes[index] != -1:
                        return None
                    sizes[index] = size
                if (
                    rows < 0
                    or not value.is_contiguous()
                    or value.is_neg()
                    or (dtype in _MAYBE_CONJUGATED and value.is_conj())
                ):
                    sources.append(None)
                else:
                    sources.append((value.data_ptr(), rows * row_bytes))
        except RuntimeError:  # a nested tensor has no shape to read
            return None
        for position, index in self._ints:
            value = leaves[position]
            if type(value) is not int or value < 0:
                return None
            if sizes[index] != value:
                if sizes[index] != -1:
                    return None
                sizes[index] = value
        for index, per in self._divisors:
            if sizes[index] % per:
                return None
        return sizes, sources


def _as_read(layout: LeafLayout, names: Sequence[str]) -> tuple[Any, ...]:
    """What is compared of a tensor leaf."""
    spec = layout.spec
    row_bytes = math.prod(layout.shape) * layout.dtype.itemsize
    common = (layout.dtype, layout.device, torch.Size(layout.shape), row_bytes)
    if isinstance(spec, Rows):
        return (names.index(spec.dim), spec.axis, spec.per, 0, *common, len(layout.shape) + 1)
    if isinstance(spec, Offsets):
        return (names.index(spec.dim), 0, 1, 1, *common, 1)
    return (-1, 0, 1, 0, *common, len(layout.shape))


def flat_binder(signature: Signature) -> Callable[[Mapping[str, Any]], list[Any]] | None:
    """What turns keywords into leaves where each argument is one leaf; None where one is a tree.

    It raises KeyError for a missing name; more names than declared are the caller's to notice.
    """
    if any(tree is not None for tree in signature.trees.values()):
        return None
    names = signature.names
    if len(names) == 1:
        only = names[0]
        return lambda kwargs: [kwargs[only]]
    getter = operator.itemgetter(*names)
    return lambda kwargs: list(getter(kwargs))


def tree_builder(tree: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """What puts leaves together as a tree; of plain containers without PyTorch's own way, which takes longer."""
    build, used = _builder(tree, 0)
    if build is None or used != tree.num_leaves:
        return lambda leaves: pytree.tree_unflatten(leaves, tree)
    return build


def _builder(tree: pytree.TreeSpec, start: int) -> tuple[Callable[[Sequence[Any]], Any] | None, int]:
    """The builder of a subtree whose leaves begin at `start`, and where they end; None for another container."""
    if tree.is_leaf():
        return lambda leaves: leaves[start], start + 1
    children: list[Callable[[Sequence[Any]], Any]] = []
    at = start
    for child in tree.children():
        build, at = _builder(child, at)
        if build is None:
            return None, at
        children.append(build)
    if tree.type is dict:
        keys = list(tree.context)
        return lambda leaves: {key: child(leaves) for key, child in zip(keys, children, strict=True)}, at
    if tree.type is list:
        return lambda leaves: [child(leaves) for child in children], at
    if tree.type is tuple:
        return lambda leaves: tuple([child(leaves) for child in children]), at
    return None, at
