"""The attention backends: one frozen record each, one choice between them, one account of why not.

Adding a backend is one file that makes a record and one line in ``_table``. A record's module is imported at once; the
package behind it only when a call asks whether the backend can be used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from mmgraph.ops.errors import BackendError, BrokenBackend, GradientError, UnknownBackend, UnusableBackend

Tensor = torch.Tensor

# (q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse) -> (out, lse or None), for checked arguments.
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool, bool], tuple[Tensor, Tensor | None]]


class Traits(NamedTuple):
    """What decides whether a backend can serve a call; nothing in it changes from batch to batch.

    A tuple, because one is made and hashed on every call.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    heads: int
    kv_heads: int
    causal: bool = False
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One backend.

    Attributes:
        name: The name users write, also in the op ``attn_<name>``.
        forward: Runs it; rows that no sequence covers come out as zeros.
        why_not: The reason why it can't serve a call of these traits, or None if it can. Raises ``BrokenBackend`` for a
            package that is installed and can't be imported.
        supports_gradient: Its log-sum-exps can feed the shared backward.
        ready: Whether it can serve these arguments (``forward``'s) without compiling or building something, which a
            capture forbids; None if it always can.
    """

    name: str
    forward: Forward
    why_not: Callable[[Traits], str | None]
    supports_gradient: bool
    ready: Callable[..., bool] | None = None


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Whether a backend can serve a call, and the reason if it can't."""

    name: str
    usable: bool
    reason: str


@lru_cache(maxsize=1)
def _table() -> dict[str, AttentionBackend]:
    from mmgraph.ops.attention import cudnn_backend, fa2, fa3, fa4, reference, torch_varlen, triton_backend

    records = (
        fa3.BACKEND,
        fa4.BACKEND,
        fa2.BACKEND,
        cudnn_backend.BACKEND,
        torch_varlen.BACKEND,
        triton_backend.BACKEND,
        reference.BACKEND,
    )
    return {record.name: record for record in records}


def backend_names() -> list[str]:
    """The names of all backends."""
    return list(_table())


def unknown_backend(name: str) -> UnknownBackend:
    """The error for a name that no backend has; it lists the names."""
    return UnknownBackend(
        f"no attention backend is named {name!r}; choose one of {', '.join(_table())}, or 'measure'."
    )


@lru_cache(maxsize=4096)
def require_backend(name: str, traits: Traits) -> AttentionBackend:
    """The record of that name, if it can serve a call of these traits.

    Raises:
        UnknownBackend: No backend has the name.
        UnusableBackend: It can't serve the call; the message has its reason and those of the others.
        BrokenBackend: Its package is installed and can't be imported.
        GradientError: A gradient is needed and the backend has none.
    """
    record = _table().get(name)
    if record is None:
        raise unknown_backend(name)
    reason = record.why_not(traits)
    if reason is not None:
        raise UnusableBackend(
            f"attention backend {name!r} can't serve this call: {reason}.\n{_listing(traits)}"
        )
    if traits.gradient and not record.supports_gradient:
        able = ", ".join(other.name for other in _table().values() if other.supports_gradient)
        raise GradientError(
            f"attention backend {name!r} has no gradient; call it under torch.no_grad(), or name one that has: {able}."
        )
    return record


@lru_cache(maxsize=4096)
def usable_backends(traits: Traits) -> dict[str, AttentionBackend]:
    """The backends that can serve a call of these traits.

    Raises:
        BrokenBackend: A package is installed and can't be imported.
        UnusableBackend: None can; the message has each one's reason.
    """
    usable = {
        record.name: record
        for record in _table().values()
        if record.why_not(traits) is None and (record.supports_gradient or not traits.gradient)
    }
    if not usable:
        raise UnusableBackend(f"no attention backend can serve this call.\n{_listing(traits)}")
    return usable


def reports(traits: Traits) -> list[BackendReport]:
    """One report per backend; a broken installation is reported, not raised."""
    found = []
    for record in _table().values():
        try:
            reason = record.why_not(traits)
        except BrokenBackend as error:
            reason = f"broken: {error}"
        if reason is None and traits.gradient and not record.supports_gradient:
            reason = "it has no gradient"
        found.append(BackendReport(record.name, reason is None, reason or "usable"))
    return found


def _listing(traits: Traits) -> str:
    return "Backends:\n" + "\n".join(f"  {report.name}: {report.reason}" for report in reports(traits))


def forget_choices() -> None:
    """Drop cached answers, for tests that install or break a backend."""
    require_backend.cache_clear()
    usable_backends.cache_clear()


__all__ = [
    "AttentionBackend",
    "BackendError",
    "BackendReport",
    "Traits",
    "backend_names",
    "forget_choices",
    "reports",
    "require_backend",
    "unknown_backend",
    "usable_backends",
]
