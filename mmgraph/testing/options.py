"""Checks of the options of strategies and asserts.

Promises: an option that is none of its choices is an `OptionError` that says what was expected, raised by the call that
gave it and not only when something is drawn.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from mmgraph.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")


def bounded(
    least: dict[str, int], *checks: Callable[[dict[str, Any]], None]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the options of each call of a function.

    Args:
        least: The smallest integer that each of these options may be; None may be given too where it is the default.
        checks: Each is given the options by name, defaults included, and raises.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            for name, low in least.items():
                value = given.arguments[name]
                if value is None and signature.parameters[name].default is None:
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or value < low:
                    raise OptionError(f"{name} must be an integer, {low} or more, got {value!r}")
            for check in checks:
                check(given.arguments)
            return fn(*args, **kwargs)

        return checked

    return decorate


def check_dtypes(options: dict[str, Any]) -> None:
    """Check the option ``dtypes``.

    Raises:
        OptionError: It is no list of floating-point dtypes, or empty.
    """
    dtypes = options["dtypes"]
    listed = list(dtypes) if isinstance(dtypes, Sequence) else []
    if not listed or not all(isinstance(kind, torch.dtype) and kind.is_floating_point for kind in listed):
        raise OptionError(
            f"dtypes must be a list of floating-point dtypes, such as [torch.bfloat16], got {dtypes!r}"
        )


def check_device(device: str) -> None:
    """Check that tensors can be made on a device, and read.

    Raises:
        OptionError: They can't.
    """
    try:
        torch.ones(1, device=device).cpu()
    except Exception as error:  # torch raises many kinds, AssertionError among them
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"device must be one on which torch can make tensors here, such as 'cpu' or 'cuda:0', got {device!r}: "
            f"{reason}"
        ) from error
