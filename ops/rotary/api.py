"""The rotary calls that users make; they pick the op, take v beside it, and nothing else."""

from collections.abc import Callable

import torch

from mmgraph.ops import rotary_checks as checks
from mmgraph.ops.checks import needs_gradient, refuse_forward_mode, refuse_traced_transforms
from mmgraph.ops.registration import overload
from mmgraph.ops.rotary.dispatch import parts, v_part

Tensor = torch.Tensor

_rope: Callable[..., tuple[Tensor, Tensor]] = overload("packed_qkv_rope")
_rope_copy: Callable[..., tuple[Tensor, Tensor, Tensor]] = overload("packed_qkv_rope_copy")
_rope_autograd: Callable[..., tuple[Tensor, Tensor, Tensor]] = overload("packed_qkv_rope_autograd")
_rope_in_place: Callable[..., None] = overload("packed_qkv_rope_")


def packed_qkv_rope(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    copy_v: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions on a packed projection, q and k in one pass, with an RMS norm of each head before it if asked.

    ``out = x * cos + rotate(x) * sin``, elementwise, where ``rotate`` takes each pair ``(a, b)`` to ``(-b, a)``. Pairs
    are ``(j, j + head_dim / 2)``, or ``(2j, 2j + 1)`` with ``interleaved``. The math is in float32 (float64 for
    float64), and q and k are rounded once, at the end. Differentiable in ``qkv``, ``q_norm`` and ``k_norm``.
    Traceable and capturable; nothing synchronises.

    Args:
        qkv: bfloat16, float16, float32 or float64 ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``: q heads,
            k heads, v heads. Rows may lie apart; where the columns aren't adjacent it is copied first.
        cos: Any floating-point dtype, ``[tokens, head_dim / 2]``, one value per pair, or ``[tokens, head_dim]``, one
            per element, whose halves may differ; never widened. Rows may have any stride, 0 too; columns are read
            where they lie 1 apart, or 2 as a complex table's parts do, and are copied first otherwise. With
            ``interleaved``, a complex ``[tokens, head_dim / 2]`` table stands for both. None: no rotation.
        sin: As ``cos``; None beside a complex table, or where ``cos`` is None.
        num_heads: Heads of q.
        num_kv_heads: Heads of k and of v; divides ``num_heads``.
        head_dim: Width of a head, even.
        interleaved: Adjacent elements are pairs.
        q_norm: Weight of the norm of each q head, ``x / sqrt(mean(x^2) + eps) * weight``; floating point
            ``[head_dim]``.
        k_norm: The same for k heads.
        eps: Added to the mean square.
        copy_v: Copy v too, in the same launch. Without it v is a view of ``qkv``, except where a gradient is needed.

    Returns:
        q ``[tokens, num_heads, head_dim]``, k and v ``[tokens, num_kv_heads, head_dim]``, in qkv's dtype; q, k and a
        copied v are new and contiguous.

    Raises:
        ArgumentError: A type, shape, dtype or device doesn't fit; or there are no tables, no norm and no ``copy_v``.
        GradientError: A table requires a gradient, which tables don't have.
    """
    op = "packed_qkv_rope"
    checks.check_types(op, qkv, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    checks.check_counts(op, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    checks.check_options(op, eps, interleaved=interleaved, copy_v=copy_v)
    checks.check_work(op, cos, sin, q_norm, k_norm, copy_v)
    given = [one for one in (qkv, cos, sin, q_norm, k_norm) if one is not None]
    refuse_forward_mode(op, *given)
    checks.check_tables_need_no_gradient(op, cos, sin)
    cos, sin = checks.real_tables(op, cos, sin, head_dim, interleaved)
    arguments = (qkv, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, interleaved, eps)
    if needs_gradient(*given):
        return _rope_autograd(*arguments)
    if copy_v:
        return _rope_copy(*arguments)
    q, k = _rope(*arguments)
    return q, k, v_part(qkv, num_heads, num_kv_heads, head_dim)


def packed_qkv_rope_(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``packed_qkv_rope``, in place: q and k are overwritten where they lie in ``qkv``. It has no gradient.

    On a GPU its values may differ from the other form's in the last bit, since each is a kernel of its own.

    Traced by torch.compile with a view for ``qkv``, it rotates out of place and copies back.

    Args:
        qkv: As for ``packed_qkv_rope``, with adjacent columns; no element shares its place with another one, or with
            a table or weight.
        cos: As for ``packed_qkv_rope``.
        sin: As for ``packed_qkv_rope``.
        num_heads: Heads of q.
        num_kv_heads: Heads of k and of v; divides ``num_heads``.
        head_dim: Width of a head, even.
        interleaved: Adjacent elements are pairs.
        q_norm: Weight of the norm of each q head, or None.
        k_norm: Weight of the norm of each k head, or None.
        eps: Added to the mean square.

    Returns:
        Views of ``qkv``: q ``[tokens, num_heads, head_dim]``, k and v ``[tokens, num_kv_heads, head_dim]``.

    Raises:
        ArgumentError: A type, shape, dtype, device or layout doesn't fit; or there are neither tables nor a norm.
        GradientError: An input requires a gradient.
    """
    op = "packed_qkv_rope_"
    checks.check_types(op, qkv, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    checks.check_counts(op, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    checks.check_options(op, eps, interleaved=interleaved)
    checks.check_work(op, cos, sin, q_norm, k_norm)
    refuse_forward_mode(op, *(one for one in (qkv, cos, sin, q_norm, k_norm) if one is not None))
    refuse_traced_transforms(op, "use packed_qkv_rope.")
    checks.check_in_place_needs_no_gradient(qkv, cos, sin, q_norm, k_norm)
    cos, sin = checks.real_tables(op, cos, sin, head_dim, interleaved)
    arguments = (qkv, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, head_dim, interleaved, eps)
    if torch.compiler.is_compiling() and qkv._base is not None:
        # Inductor loses the offset of a part of a buffer that an op writes into, where it isn't a constant (pytorch
        # issue 198068; torch 2.11 and 2.13), and whether it is can't be seen here. Copies into parts are traced right.
        checks.check_rope_in_place(*arguments)
        q, k = _rope(*arguments)
        views = parts(qkv, num_heads, num_kv_heads, head_dim)
        views[0].copy_(q)
        views[1].copy_(k)
        return views
    _rope_in_place(*arguments)
    return parts(qkv, num_heads, num_kv_heads, head_dim)
