"""What a function returned against what was declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .buckets import Bucket
from .errors import OutputError
from .layout import LeafLayout
from .spec import Constant, Offsets, Rows, Spec, Static

if TYPE_CHECKING:
    from .generation import Generation

__all__ = ["check_outputs", "output_layout", "refuse_tensors"]


def output_layout(
    path: str, spec: Spec | None, value: Any, bucket: Bucket, device: torch.device
) -> LeafLayout | None:
    """The layout of one output, from its spec and what the function returned at a bucket; None for what is no tensor.

    Raises:
        OutputError: the value is not what was declared.
    """
    if spec is None or isinstance(spec, Constant):
        refuse_tensors(path, spec, value)
        return None
    if not isinstance(value, torch.Tensor):
        remedy = "declare constant() for other values"
        if isinstance(value, (list, tuple, dict)):
            remedy = "declare outputs with the structure that it has, such as (rows(...), rows(...))"
        raise OutputError(f"{path} must be a tensor, got {type(value).__name__}: {remedy}")
    if value.device != device:
        raise OutputError(f"{path} is on {value.device}, the inputs are on {device}")
    shape = tuple(value.shape)
    if isinstance(spec, Rows):
        rows = bucket[spec.dim] // spec.per
        if len(shape) <= spec.axis or shape[spec.axis] != rows:
            raise OutputError(
                f"{path} must have {rows} rows along axis {spec.axis} at {bucket} (one per {spec.per} of "
                f"{spec.dim!r}), got shape {list(shape)}"
            )
        shape = shape[: spec.axis] + shape[spec.axis + 1 :]
    elif isinstance(spec, Offsets):
        shape = ()
    elif not isinstance(spec, Static):
        raise OutputError(f"{path} has a spec that outputs cannot have: {spec!r}")
    return LeafLayout(path, spec, value.dtype, device, shape)


def refuse_tensors(path: str, spec: Spec | None, value: Any) -> None:
    """Refuses an output that is declared to be no tensor and is, or holds, one: nobody would copy it out."""
    if spec is None and value is not None:
        raise OutputError(f"{path} is declared as None, got {type(value).__name__}: declare its spec")
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        raise OutputError(
            f"{path} is declared constant but is a tensor or holds one: declare rows or static, so that it is "
            "copied out"
        )


def check_outputs(generation: Generation, flat: Sequence[Any], bucket: Bucket) -> None:
    """Raises OutputError where a run's outputs at a bucket aren't those of the runs before."""
    paths, specs = generation.signature.output_paths, generation.signature.outputs
    plans = generation.output_plans or ()
    for plan, path, spec, value in zip(plans, paths, specs, flat, strict=True):
        if plan.layout is None:
            refuse_tensors(path, spec, value)
            continue
        expected = plan.layout.full_shape(bucket)
        if (
            not isinstance(value, torch.Tensor)
            or tuple(value.shape) != expected
            or value.dtype != plan.layout.dtype
        ):
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise OutputError(f"{path} at {bucket} must be {plan.layout.dtype} {list(expected)}, got {got}")
