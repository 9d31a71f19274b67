"""Which backend is asked for where a call names none: by a context manager, or by one environment variable.

An argument goes before the context manager, which goes before ``MMGRAPH_ATTENTION_BACKEND``, which goes before the
measured choice. The variable is read here, at the first call that needs it, and not again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from mmgraph.ops.attention.registry import backend_names, unknown_backend
from mmgraph.ops.errors import ArgumentError, OpError, UnknownBackend

VARIABLE = "MMGRAPH_ATTENTION_BACKEND"
MEASURE = "measure"

_asked: ContextVar[str | None] = ContextVar("mmgraph_attention_backend", default=None)


@lru_cache(maxsize=1)
def _from_environment() -> str | None:
    name = os.environ.get(VARIABLE) or None
    if name is not None:
        try:
            check_name(name)
        except UnknownBackend as error:
            raise UnknownBackend(
                f"{error} ({name!r} was asked for by the environment variable {VARIABLE}.)"
            ) from error
    return name


def check_name(name: str) -> None:
    """Raise UnknownBackend for a name that neither a backend nor a way of choosing has."""
    if not isinstance(name, str) or (name != MEASURE and name not in backend_names()):
        raise unknown_backend(name)


def asked_for() -> tuple[str | None, str]:
    """The name asked for outside of the call, or None for the measured choice; and who asked.

    Raises:
        UnknownBackend: The environment variable has a name that no backend has.
    """
    name = _asked.get()
    if name is not None:
        return name, "attention_backend(...)"
    name = _from_environment()
    return name, f"the environment variable {VARIABLE}"


def with_origin(error: OpError, name: str, origin: str) -> OpError:
    """The error, which says who asked for the name where that wasn't the call."""
    return type(error)(f"{error}\n({name!r} was asked for by {origin}.)") if origin else error


@contextmanager
def attention_backend(name: str | None) -> Iterator[None]:
    """Let calls of ``varlen_attention`` that name no backend use this one, in this thread or task, for a while.

    What is asked is looked up when the attention runs, so it also holds inside a compiled model. A captured graph
    replays the backend that it was captured with. Autograd runs a backward on threads of its own, so what is recomputed
    there (checkpointing) doesn't see it: name the backend in the call.

    Args:
        name: A backend's name; ``"measure"`` for the fastest by a measurement of each shape; None as if no context
            manager were around, so that the environment variable decides, or else the measurements.

    Raises:
        UnknownBackend: No backend has the name.
        ArgumentError: It is entered while torch.export traces.
    """
    if torch.compiler.is_exporting():
        raise ArgumentError(
            "attention_backend(...) can't be entered inside what is exported: the program would not hold it. Enter it "
            "around the call of the program, or name backend= in the call."
        )
    if name is not None:
        check_name(name)
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)
