"""Which usable backend serves a call that names none: one function of the sequence shape, one order per case.

Only real integers reach it (it runs inside the op), so that a compiled graph holds no threshold.
"""

from functools import lru_cache

import torch

from mmgraph.ops.attention.registry import AttentionBackend, BackendReport, Traits, reports, usable_backends
from mmgraph.ops.attention.registry import require_backend as _require

# Sequences that one block of the Triton kernel holds whole (windows): bound by bytes and launches, not by
# products.
_WINDOW = 64
# On Hopper the Triton kernel takes 0.70 to 0.97 of FlashAttention 2's time on sequences of 512 to 16384 and widths up
# to 128, causal or not, grouped or not; on sequences around 200 it takes 1.16 of it (bench/attention.py, H200).
_HOPPER_LONG = 512
_HOPPER_WIDTH = 128

_TRITON_FIRST = ("triton", "fa2", "reference")
_FA2_FIRST = ("fa2", "triton", "reference")


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    )


def preference(traits: Traits, max_seqlen: int) -> tuple[str, ...]:
    """Names of backends, the fastest first, whether usable or not.

    Args:
        traits: What the call is like.
        max_seqlen: The longest sequence.
    """
    if max_seqlen <= _WINDOW:
        return _TRITON_FIRST
    narrow = traits.head_dim <= _HOPPER_WIDTH and traits.v_dim <= _HOPPER_WIDTH
    if max_seqlen >= _HOPPER_LONG and narrow and _is_hopper(traits.device):
        return _TRITON_FIRST
    return _FA2_FIRST


def choose(traits: Traits, max_seqlen: int) -> AttentionBackend:
    """The backend for a call of these traits and this longest sequence.

    Raises:
        BrokenBackend: A package is installed and can't be imported.
        UnusableBackend: No backend can serve the call.
    """
    usable = usable_backends(traits)
    for name in preference(traits, max_seqlen):
        if name in usable:
            return usable[name]
    return next(iter(usable.values()))


def _make_traits(
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    head_dim: int,
    v_dim: int | None,
    heads: int,
    kv_heads: int | None,
    causal: bool,
    gradient: bool,
) -> Traits:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device == torch.device("cuda"):  # no index given
        device = torch.device("cuda", torch.cuda.current_device())
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Traits(device, dtype, head_dim, v_dim or head_dim, heads, kv_heads or heads, causal, gradient)


def select_backend(
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int = 64,
    v_dim: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    tokens: int = 4096,
    batch: int = 1,
    max_seqlen: int = 4096,
    causal: bool = False,
    gradient: bool = False,
    backend: str | None = None,
) -> str:
    """The name of the backend that ``varlen_attention`` would use for such a call.

    Args:
        device: The tensors' device; None is the current CUDA device, or the CPU where there is none.
        dtype: The tensors' dtype; None is bfloat16 on a GPU and float32 on a CPU.
        head_dim: Width of q and k.
        v_dim: Width of v; None is ``head_dim``.
        heads: Query heads.
        kv_heads: Key and value heads; None is ``heads``.
        tokens: Rows of q; the measured order doesn't depend on it.
        batch: Sequences; the same.
        max_seqlen: The longest sequence.
        causal: Whether a row sees only itself and earlier ones.
        gradient: Whether a gradient is needed.
        backend: A name asked for; it is checked and returned.

    Returns:
        The name.

    Raises:
        UnknownBackend: No backend has the name asked for.
        UnusableBackend: It, or every backend, can't serve the call; the message lists the reasons.
        BrokenBackend: A package is installed and can't be imported.
        GradientError: A gradient is needed and the backend asked for has none.
    """
    traits = _make_traits(device, dtype, head_dim, v_dim, heads, kv_heads, causal, gradient)
    if backend is not None:
        return _require(backend, traits).name
    return choose(traits, max_seqlen).name


def explain_backends(
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int = 64,
    v_dim: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    causal: bool = False,
    gradient: bool = False,
) -> list[BackendReport]:
    """Every attention backend with "usable", or the reason why it can't serve such a call.

    Args:
        device: As for ``select_backend``, like the others.
        dtype: The tensors' dtype.
        head_dim: Width of q and k.
        v_dim: Width of v.
        heads: Query heads.
        kv_heads: Key and value heads.
        causal: Whether a row sees only itself and earlier ones.
        gradient: Whether a gradient is needed.

    Returns:
        One record per backend: ``name``, ``usable``, ``reason``. A broken installation is reported, not raised.
    """
    return reports(_make_traits(device, dtype, head_dim, v_dim, heads, kv_heads, causal, gradient))
