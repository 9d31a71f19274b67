"""The attention call that users make; it picks the op with or without a gradient and nothing else."""

from collections.abc import Callable

import torch

from mmgraph.ops.attention.registry import backend_names, unknown_backend
from mmgraph.ops.checks import check_max_seqlen_type, check_tensors, needs_gradient, refuse_forward_mode
from mmgraph.ops.registration import overload

_attention: Callable[..., torch.Tensor] = overload("varlen_attention")
_attention_lse = overload("varlen_attention_lse")
_named: dict[str, Callable[..., torch.Tensor]] = {name: overload(f"attn_{name}") for name in backend_names()}


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
            They start at 0, never decrease and end within the tokens. On CUDA the ``triton`` and ``reference``
            backends stay inside the tensors whatever they are; ``fa2``, and the backward in half precision, trust them.
        max_seqlen: The longest sequence, or more; a Python int.
        scale: Multiplies the scores; None is ``head_dim ** -0.5``.
        causal: A row sees itself and earlier rows of its sequence only.
        backend: A backend's name, or None for the choice that measurements justify.

    Returns:
        A new contiguous tensor ``[tokens, heads, v_dim]`` in q's dtype.

    Raises:
        ArgumentError: A shape, dtype, device or ``max_seqlen`` doesn't fit.
        DataError: On CPU, the content of ``cu_seqlens`` is wrong.
        UnknownBackend, UnusableBackend, BrokenBackend: The backend asked for doesn't exist, can't serve the call, or is
            installed and can't be imported.
        GradientError: An input needs a gradient and the backend asked for has none.
    """
    check_tensors("varlen_attention", q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    refuse_forward_mode("varlen_attention", q, k, v)
    if type(max_seqlen) is not int:
        check_max_seqlen_type(max_seqlen)
    if needs_gradient(q, k, v):
        if backend is not None and backend not in _named:
            raise unknown_backend(backend)
        out: torch.Tensor = _attention_lse(q, k, v, cu_seqlens, max_seqlen, scale, causal, backend or "")[0]
        return out
    if backend is None:
        return _attention(q, k, v, cu_seqlens, max_seqlen, scale, causal)
    op = _named.get(backend)
    if op is None:
        raise unknown_backend(backend)
    return op(q, k, v, cu_seqlens, max_seqlen, scale, causal)
