"""What an op that writes into a caller's tensor checks of its memory; only real tensors can show it.

A tensor's range is all from its first to its last element. Two ranges that interleave without sharing an element, such
as slices of columns of one buffer, are refused too.
"""

import torch

from mmgraph.ops.errors import ArgumentError


def check_no_overlap(op: str, target_name: str, target: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Raise ArgumentError if the target, a matrix, lies in the range of an input, or has one place twice."""
    (inner, size), (outer, count) = sorted(zip(target.stride(), target.shape, strict=True))
    if target.numel() and ((size > 1 and inner == 0) or (count > 1 and outer <= (size - 1) * inner)):
        raise ArgumentError(
            f"{op}: {target_name}'s elements must each have a place of their own in memory, got shape "
            f"{list(target.shape)} with strides {list(target.stride())}; give it a tensor that isn't expanded."
        )
    start, end = _span(target)
    for name, tensor in inputs.items():
        first, last = _span(tensor)
        if start < last and first < end:
            raise ArgumentError(
                f"{op}: {target_name} overlaps {name} in memory, counted from the first element of each to its last; "
                "give it memory of its own."
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
