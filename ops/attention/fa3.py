"""The fa3 backend: FlashAttention 3, made for Hopper GPUs, from whichever package of it is installed.

The fa3-fwd package registers its kernel under a name of its own; FlashAttention's own ``flash_attn_interface`` and the
tokenspeed-fa3 package (which installs the same modules) register it as ``flash_attn_3``. The registered op is called
directly, which saves the host two wrappers. Builds differ in what they leave out (fa3-fwd has no float16), and say so
in a table that comes with them.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from mmgraph.ops.attention import flash_shared
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.packages import import_package, is_installed

Tensor = torch.Tensor

# Module to import, name under which its op is registered, module with the table of what the build leaves out.
_PACKAGES = (
    ("fa3_fwd_interface", "fa3_fwd", "fa3_fwd_config"),
    ("flash_attn_interface", "flash_attn_3", "flash_attn_config"),
)
_ARGUMENTS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "is_causal",
    "num_splits",
)


class _Build(NamedTuple):
    """An installed build: its op, the op's arguments and their places, and the flags of what was left out."""

    name: str
    op: Callable[..., Any]
    defaults: tuple[Any, ...]
    places: tuple[int, ...]
    left_out: dict[str, bool]


def _load(module: str, namespace: str, config: str) -> _Build:
    import_module(module)
    op = getattr(torch.ops, namespace).fwd.default
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    missing = [name for name in _ARGUMENTS if name not in names]
    if missing:
        raise ImportError(f"its kernel takes no {', '.join(missing)}; it takes {', '.join(names)}")
    places = tuple(names.index(name) for name in _ARGUMENTS)
    defaults = tuple(a.default_value if a.has_default_value() else None for a in arguments[: max(places) + 1])
    # Older builds come without the table, and then leave nothing out that is asked for here.
    left_out = dict(import_module(config).CONFIG.get("build_flags", {})) if is_installed(config) else {}
    return _Build(module, op, defaults, places, left_out)


@lru_cache(maxsize=1)
def _build() -> _Build | None:
    for package in _PACKAGES:
        found: _Build | None = import_package(package[0], partial(_load, *package))
        if found is not None:
            return found
    return None


def source() -> str | None:
    """The module that the kernels come from, or None where no build is installed.

    Raises:
        BrokenBackend: One is installed and can't be imported.
    """
    build = _build()
    return None if build is None else build.name


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention 3 per sequence; zeros where no sequence covers. The offsets must be right (see flash_shared)."""
    build = _build()
    if build is None:
        raise RuntimeError("fa3 was called though it isn't installed")
    v_dim = v.shape[2]
    q, k, v, cu_seqlens, scale = flash_shared.prepare(q, k, v, cu_seqlens, scale)
    arguments = list(build.defaults)
    values = (
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale,
        causal,
        1,
    )
    for place, value in zip(build.places, values, strict=True):
        arguments[place] = value
    out, lse = build.op(*arguments)[:2]
    overhang = (q, k, v, scale, causal)
    return flash_shared.finish(out, lse if with_lse else None, v_dim, cu_seqlens, max_seqlen, overhang)


# The kernels' width classes and the flag of each that a build without it sets.
_WIDTHS = ((64, "HDIM64"), (96, "HDIM96"), (128, "HDIM128"), (192, "HDIM192"), (256, "HDIM256"))


def _why_not(traits: Traits) -> str | None:
    reason = flash_shared.why_not_nvidia(traits, (9,)) or flash_shared.why_not_half(traits)
    if reason is not None:
        return reason
    build = _build()
    if build is None:
        return "no FlashAttention 3 is installed (fa3-fwd, flash_attn_interface or tokenspeed-fa3)"
    if traits.dtype == torch.float16 and build.left_out.get("FLASHATTENTION_DISABLE_FP16"):
        return f"the installed build ({build.name}) has no float16 kernels"
    if build.left_out.get("FLASHATTENTION_DISABLE_VARLEN"):
        return f"the installed build ({build.name}) has no kernels for sequences of varying lengths"
    width = flash_shared.padded_width(traits.head_dim, traits.v_dim)
    if not any(
        width <= largest and not build.left_out.get(f"FLASHATTENTION_DISABLE_{flag}")
        for largest, flag in _WIDTHS
    ):
        return f"the installed build ({build.name}) has no kernels for width {width}"
    return flash_shared.why_not_clear()


BACKEND = AttentionBackend("fa3", forward, _why_not, supports_gradient=True)
