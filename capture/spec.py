"""How one argument pads into a bucket, and how one output is cut back out of it.

A declaration is a pytree whose leaves are the specs below. `Signature` holds the flattened declaration of a
function's inputs and outputs, checks it against the grid once, and turns a call's arguments into flat leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .buckets import BucketGrid
from .errors import CallError, SpecError

__all__ = [
    "BucketSize",
    "Constant",
    "InputLeaf",
    "Offsets",
    "Rows",
    "Signature",
    "Spec",
    "Static",
    "bucket_size",
    "constant",
    "offsets",
    "rows",
    "static",
]


@dataclass(frozen=True)
class Spec:
    """Base of all specs."""


@dataclass(frozen=True)
class Rows(Spec):
    """See `rows`."""

    dim: str
    per: int = 1
    axis: int = 0
    fill: float = 0
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    marks_padding: bool = False


@dataclass(frozen=True)
class Offsets(Spec):
    """See `offsets`."""

    dim: str
    of: str
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class BucketSize(Spec):
    """See `bucket_size`."""

    dim: str


@dataclass(frozen=True)
class Static(Spec):
    """See `static`."""

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Constant(Spec):
    """See `constant`."""


def rows(
    dim: str,
    *,
    per: int = 1,
    axis: int = 0,
    fill: float = 0,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    marks_padding: bool = False,
) -> Rows:
    """A tensor with one row for every `per` of the size `dim`.

    Args:
        dim: a name of the grid.
        per: how many of `dim` make one row (a merger that turns 4 tokens into 1 row: `per=4`). It must divide
            every bucket's size, and the size of every call.
        axis: the axis along which the rows lie.
        fill: what the padding rows of an input hold.
        dtype: the dtype, where it is not to be taken from the example.
        shape: the other axes' sizes in order, where they are not to be taken from the example.
        marks_padding: the function may tell padding by this input's fill, as by a mask that is false there. A proof of
            padding then leaves it alone.
    """
    if isinstance(per, bool) or not isinstance(per, int) or per < 1:
        raise SpecError(f"rows({dim!r}): per must be an integer of at least 1, got {per!r}")
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise SpecError(f"rows({dim!r}): axis must be an integer of at least 0, got {axis!r}")
    if not isinstance(fill, (bool, int, float)):
        raise SpecError(f"rows({dim!r}): fill must be a number, got {fill!r}")
    return Rows(
        _name(dim, "rows"),
        per,
        axis,
        fill,
        dtype,
        None if shape is None else tuple(shape),
        bool(marks_padding),
    )


def offsets(dim: str, *, of: str, dtype: torch.dtype | None = None) -> Offsets:
    """Cumulative offsets `[dim + 1]` of `dim` sequences that lie in the rows of size `of`.

    Padding sequences have length zero: every padding entry holds the call's last offset.

    Args:
        dim: the name of the number of sequences.
        of: the name of the size that the offsets point into.
        dtype: int32 or int64, where it is not to be taken from the example.
    """
    return Offsets(_name(dim, "offsets"), _name(of, "offsets"), dtype)


def bucket_size(dim: str) -> BucketSize:
    """A Python int: the caller gives the call's own size, the captured function gets the bucket's."""
    return BucketSize(_name(dim, "bucket_size"))


def static(*, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Static:
    """A tensor of one shape in every call. Its values are copied in before each replay."""
    return Static(dtype, None if shape is None else tuple(shape))


def constant() -> Constant:
    """A value that is part of the graph. A call with another value is a miss.

    Python values are compared with `==`; tensors by identity, so a constant tensor is one that lives on, such
    as a table.
    """
    return Constant()


def _name(dim: object, spec: str) -> str:
    if not isinstance(dim, str) or not dim:
        raise SpecError(f"{spec}(...) takes the name of a size, such as {spec}('tokens'), got {dim!r}")
    return dim


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Spec)


@dataclass(frozen=True)
class InputLeaf:
    """One leaf of the inputs: where it stands (`patches`, `state['k'][0]`) and its spec."""

    path: str
    spec: Spec


class Signature:
    """The declared inputs and outputs of a function, flattened and checked against a grid.

    Args:
        inputs: argument name to a pytree of specs.
        outputs: a pytree of specs; None stands where the function returns None.
        grid: the sizes that the specs name.

    Raises:
        SpecError: a leaf that is no spec, a name that is not in the grid, a name of the grid that no input
            gives, or a `per` that does not divide a bucket.
    """

    def __init__(self, inputs: Mapping[str, Any], outputs: Any, grid: BucketGrid) -> None:
        if not isinstance(inputs, Mapping) or not inputs:
            raise SpecError(f"inputs must map argument names to specs, got {inputs!r}")
        self.names: tuple[str, ...] = tuple(inputs)
        self.trees: dict[str, pytree.TreeSpec | None] = {}
        leaves: list[InputLeaf] = []
        for name, tree in inputs.items():
            if not isinstance(name, str):
                raise SpecError(f"argument names must be strings, got {name!r}")
            flat, treespec = pytree.tree_flatten_with_path(tree, is_leaf=_is_leaf)
            self.trees[name] = None if isinstance(tree, Spec) else treespec
            for path, leaf in flat:
                where = name + pytree.keystr(path)
                if not isinstance(leaf, Spec):
                    raise SpecError(
                        f"input {where} must be a spec such as rows('tokens'), got {leaf!r}; dataclasses "
                        "must be registered as pytrees to hold specs"
                    )
                leaves.append(InputLeaf(where, leaf))
        self.inputs: tuple[InputLeaf, ...] = tuple(leaves)
        flat_out, self.output_tree = pytree.tree_flatten_with_path(outputs, is_leaf=_is_leaf)
        self.outputs: tuple[Spec | None, ...] = tuple(leaf for _, leaf in flat_out)
        self.output_paths: tuple[str, ...] = tuple("output" + pytree.keystr(path) for path, _ in flat_out)
        self.grid = self._grid_for(grid)
        self._check_names()

    def _grid_for(self, grid: BucketGrid) -> BucketGrid:
        """The grid, without its `within` where the inner size is one that tensors have.

        A size that tensors have must never be taken for less than it is.
        """
        every = [leaf.spec for leaf in self.inputs] + [spec for spec in self.outputs if spec is not None]
        of_tensors = {spec.dim for spec in every if isinstance(spec, (Rows, Offsets))}
        clash = sorted(of_tensors & grid.within.keys())
        if not clash:
            return grid
        if not grid.within_is_default:
            raise SpecError(
                f"the grid says that {clash[0]!r} lies within {grid.within[clash[0]]!r}, but rows or offsets have "
                "that size: within is for lengths that are given by bucket_size alone"
            )
        return grid.without_within()

    def _check_names(self) -> None:
        known, given = set(self.grid.names), set()
        for leaf in self.inputs:
            for dim in _dims(leaf.spec):
                _require_known(dim, leaf.path, known)
            if isinstance(leaf.spec, (Rows, Offsets, BucketSize)):
                given.add(leaf.spec.dim)
        for path, spec in zip(self.output_paths, self.outputs, strict=True):
            if spec is None:
                continue
            if not isinstance(spec, (Rows, Offsets, Static, Constant)):
                raise SpecError(f"{path} must be rows, offsets, static, constant or None, got {spec!r}")
            for dim in _dims(spec):
                _require_known(dim, path, known)
        unfed = [name for name in self.grid.names if name not in given]
        if unfed:
            raise SpecError(
                f"no input gives the size {', '.join(map(repr, unfed))} of the grid, so no call could be given a "
                "bucket: name it in an input's rows, offsets or bucket_size, or take it out of the grid"
            )
        every = [(leaf.path, leaf.spec) for leaf in self.inputs]
        every += [(p, s) for p, s in zip(self.output_paths, self.outputs, strict=True) if s is not None]
        for path, spec in every:
            if isinstance(spec, Rows) and spec.per > 1:
                for bucket in self.grid:
                    if bucket[spec.dim] % spec.per:
                        raise SpecError(
                            f"{path} has one row per {spec.per} of {spec.dim!r}, which does not divide "
                            f"{bucket}: use sizes of {spec.dim!r} that are multiples of {spec.per}"
                        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's flat leaves, in the order of `inputs`.

        Raises:
            CallError: too many, missing, repeated or unknown arguments, or one whose structure isn't the
                declared one.
        """
        if args:
            if len(args) > len(self.names):
                raise CallError(
                    f"expected at most {len(self.names)} arguments {list(self.names)}, got {len(args)}"
                )
            positional = dict(zip(self.names, args, strict=False))
            repeated = positional.keys() & kwargs.keys()
            if repeated:
                raise CallError(
                    f"argument {min(repeated)!r} is given both by position and by name: give it once"
                )
            kwargs = {**positional, **kwargs}
        if len(kwargs) != len(self.names) or any(name not in kwargs for name in self.names):
            missing = [name for name in self.names if name not in kwargs]
            unknown = [name for name in kwargs if name not in self.names]
            raise CallError(
                f"expected the arguments {list(self.names)}: missing {missing}, unknown {unknown}; every declared "
                "input must be given, and nothing else"
            )
        leaves: list[Any] = []
        for name, tree in self.trees.items():
            value = kwargs[name]
            if tree is None:
                leaves.append(value)
                continue
            try:
                leaves.extend(tree.flatten_up_to(value))
            except ValueError as error:
                raise CallError(f"argument {name!r} does not have the declared structure: {error}") from None
        return leaves

    def arguments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The function's keyword arguments, made from flat leaves."""
        arguments: dict[str, Any] = {}
        position = 0
        for name, tree in self.trees.items():
            if tree is None:
                arguments[name] = leaves[position]
                position += 1
            else:
                arguments[name] = pytree.tree_unflatten(
                    list(leaves[position : position + tree.num_leaves]), tree
                )
                position += tree.num_leaves
        return arguments


def _dims(spec: Spec) -> tuple[str, ...]:
    if isinstance(spec, Offsets):
        return (spec.dim, spec.of)
    if isinstance(spec, (Rows, BucketSize)):
        return (spec.dim,)
    return ()


def _require_known(dim: str, path: str, known: set[str]) -> None:
    if dim not in known:
        raise SpecError(
            f"{path} names the size {dim!r}, which the grid does not have: its sizes are {sorted(known)}"
        )
