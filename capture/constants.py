"""Values that are part of a graph: what they were at the capture, and whether a call's are the same.

Containers and arrays are compared by their contents as they were at the capture, so that one that was changed
in place is another value; tensors by identity. Types count at every level, and so does the sign of zero: a
graph has them built in.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from .errors import CallError

__all__ = ["frozen_constant", "same_constant"]


def frozen_constant(path: str, value: Any) -> Any:
    """The value as it is now, apart from the object that the caller may go on to change.

    Raises:
        CallError: the value can't be compared with itself, so no later call could be compared with it.
    """
    frozen = _copied(value)
    try:
        comparable = same_constant(frozen, value)
    except Exception as error:
        raise CallError(
            f"{path} is a constant that can't be compared ({type(error).__name__}: {error})"
        ) from error
    if not comparable:
        raise CallError(
            f"{path} is a constant of type {type(value).__name__} that is not equal to its own copy: pass a plain "
            "value, or give the type an __eq__"
        )
    return frozen


def same_constant(expected: Any, value: Any) -> bool:
    """Whether a call's value is the captured one."""
    if type(expected) is not type(value):
        return False
    if isinstance(expected, torch.Tensor):
        return expected is value
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(value) and all(map(same_constant, expected, value))
    if isinstance(expected, dict):
        return list(expected) == list(value) and all(
            same_constant(expected[key], value[key]) for key in expected
        )
    if isinstance(expected, np.ndarray):
        same_form = expected.dtype == value.dtype and expected.shape == value.shape
        return bool(same_form and expected.tobytes() == value.tobytes())
    if isinstance(expected, float):
        if math.isnan(expected):
            return math.isnan(value)
        return expected == value and math.copysign(1, expected) == math.copysign(1, value)
    return expected is value or bool(expected == value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, (np.ndarray, list, tuple, dict)):
        return copy.deepcopy(value)
    return value
