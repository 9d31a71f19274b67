"""Declared names against the parameters that a function has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .errors import SpecError

__all__ = ["check_parameters"]

_RESERVED = "variant"


def check_parameters(fn: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Raises SpecError for a declared name that a call can't have, or that the function does not take.

    The function is asked only where its parameters can be read.
    """
    if isinstance(inputs, Mapping) and _RESERVED in inputs:
        raise SpecError(
            f"no input can be named {_RESERVED!r}, which calls use to name a variant's graphs: wrap the function in "
            "one whose parameter has another name"
        )
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters
    except Exception:  # a builtin, which has none to read, or an object whose own code fails
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in inputs if name not in named]
    if unknown:
        raise SpecError(
            f"the function has no parameter {unknown[0]!r}: inputs are passed by name, and its parameters are {named}"
        )
