"""The attention call that users make; it picks the op with or without a gradient and nothing else."""

from collections.abc import Callable

import torch

from mmgraph.ops.attention.registry import backend_names, unknown_backend
from mmgraph.ops.attention.settings import MEASURE
from mmgraph.ops.checks import (
    check_max_seqlen_type,
    check_scalars,
    check_tensors,
    needs_gradient,
    refuse_forward_mode,
)
from mmgraph.ops.registration import overload

_attention: Callable[..., torch.Tensor] = overload("varlen_attention")
_attention_lse = overload("varlen_attention_lse")
_named: dict[str, Callable[..., torch.Tensor]] = {
    name: overload(f"attn_{name}") for name in (*backend_names(), MEASURE)
}


_Tensor = torch.Tensor
_LARGEST = 0x7FFFFFFF


def _are_tensors(q: object, k: object, v: object, cu_seqlens: object) -> bool:
    if type(q) is type(k) is type(v) is type(cu_seqlens) is _Tensor:
        return True  # most often, and said at once
    return all(isinstance(value, _Tensor) for value in (q, k, v, cu_seqlens))


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention within each of many sequences that lie one after another.

    Rows that no sequence covers (``cu_seqlens[-1]`` and after) come out as zeros, and what they hold in q, k and v
    reaches nothing. Sequences of length zero are legal, and so is no sequence at all. Differentiable in q, k and v.
    Traceable and capturable; nothing synchronises.

    Args:
        q: ``[tokens, heads, head_dim]``; strided views of a packed projection are welcome, also for k and v.
        k: ``[tokens, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[tokens, kv_heads, v_dim]``.
        cu_seqlens: int32 ``[batch + 1]`` on the same device: where each sequence starts, and where the last one ends.
            They start at 0, never decrease and end within the tokens. On CUDA the ``triton``, ``flashinfer_cudnn`` and
            ``reference`` backends stay inside the tensors whatever they are; ``fa2``, ``fa3``, ``fa4``, ``torch``,
            and the backward in half precision, trust them.
        max_seqlen: The longest sequence, or more; a Python int.
        scale: Multiplies the scores; None is ``head_dim ** -0.5``.
        causal: A row sees itself and earlier rows of its sequence only.
        backend: A backend's name; None for what ``attention_backend`` or the environment asks for, or else the choice
            that measurements justify; ``"measure"`` to time every usable backend on this call's tensors, once per
            shape, and keep the fastest (it waits for the device, so run each shape once before a capture).

    Returns:
        A new contiguous tensor ``[tokens, heads, v_dim]`` in q's dtype.

    Raises:
        ArgumentError: A shape, dtype, device or ``max_seqlen`` doesn't fit.
        DataError: On CPU, the content of ``cu_seqlens`` is wrong.
        UnknownBackend, UnusableBackend, BrokenBackend: The backend asked for doesn't exist, can't serve the call, or is
            installed and can't be imported.
        GradientError: An input needs a gradient and the backend asked for has none.
        DuringCaptureError: A graph is being captured, and the backend has to compile or measure something first.
    """
    if not _are_tensors(q, k, v, cu_seqlens):
        check_tensors("varlen_attention", q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    if type(max_seqlen) is not int or max_seqlen > _LARGEST:
        check_max_seqlen_type(max_seqlen)
    if (scale is not None and type(scale) is not float) or type(causal) is not bool:
        check_scalars(scale, causal)
    refuse_forward_mode("varlen_attention", q, k, v)
    if backend is None:
        op = _attention
    else:
        found = _named.get(backend) if isinstance(backend, str) else None
        if found is None:
            raise unknown_backend(backend)
        op = found
    if needs_gradient(q, k, v):
        out: torch.Tensor = _attention_lse(q, k, v, cu_seqlens, max_seqlen, scale, causal, backend or "")[0]
        return out
    return op(q, k, v, cu_seqlens, max_seqlen, scale, causal)
