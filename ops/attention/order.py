"""Which usable backend serves a call that names none: the fastest by the measurements of this architecture.

Only real integers reach it (it runs inside the op), so that a compiled graph holds no threshold. Sizes are rounded up
to five bits, and each class of shapes is decided once.

Where an architecture wasn't measured, and for backends that weren't, a fixed order holds: on Hopper fa3, then fa4; on
compute capability 10.x fa4; on other NVIDIA GPUs fa2, and triton for windows; on others triton; on a CPU the reference.
"""

import logging
from functools import lru_cache

import torch

from mmgraph.ops import checks
from mmgraph.ops.attention import choice_table, settings
from mmgraph.ops.attention.choice_model import EQUAL, Shape, microseconds, window_form
from mmgraph.ops.attention.registry import AttentionBackend, BackendReport, Traits, reports, usable_backends
from mmgraph.ops.attention.registry import require_backend as _require
from mmgraph.ops.attention.triton_backend import WINDOW
from mmgraph.ops.errors import ArgumentError, OpError

_FINE = 2048  # the longest length that is rounded by 16
_OP = "select_backend, explain_backends"
_log = logging.getLogger("mmgraph.ops.attention")

_HOPPER = ("fa3", "fa4", "fa2", "flashinfer_cudnn", "torch", "triton", "reference")
_BLACKWELL = ("fa4", "flashinfer_cudnn", "fa2", "torch", "triton", "reference")
_OTHER_NVIDIA = ("fa2", "torch", "triton", "flashinfer_cudnn", "reference")
_OTHERS = ("triton", "reference")


def unmeasured_order(capability: tuple[int, int] | None, max_seqlen: int) -> tuple[str, ...]:
    """Names of backends, the first one first, where no measurement says more.

    Args:
        capability: Of an NVIDIA GPU; None for anything else.
        max_seqlen: The longest sequence.
    """
    if capability is None:
        return _OTHERS
    order = {9: _HOPPER, 10: _BLACKWELL}.get(capability[0], _OTHER_NVIDIA)
    if max_seqlen > WINDOW:
        return order
    return ("triton", *(name for name in order if name != "triton"))


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=4096)
def rank(traits: Traits, tokens: int, batch: int, max_seqlen: int) -> tuple[AttentionBackend, ...]:
    """The usable backends for a call of these traits and this shape, the fastest first.

    Raises:
        BrokenBackend: A package is installed and can't be imported.
        UnusableBackend: No backend can serve the call.
    """
    return _decide(traits, rounded_shape(tokens, batch, max_seqlen, traits))


def rounded_shape(tokens: int, batch: int, max_seqlen: int, traits: Traits) -> Shape | None:
    """The class of a shape, with sizes rounded up to about five bits; None for a call without a row.

    The longest length, up to 2048, stays on its side of a tile's border.
    """
    if tokens <= 0 or batch <= 0 or max_seqlen <= 0:
        return None
    longest = min(max(max_seqlen, -(-tokens // batch)), tokens)
    batch = min(batch, tokens)
    is_even = longest * batch <= EQUAL * tokens
    rows, sequences = _five_bits(tokens), _five_bits(batch)
    # By 16 where that is finer and matters: the tiles and blocks of all kernels are multiples of it.
    longest = min(_five_bits(longest), -(-longest // 16) * 16 if longest <= _FINE else _five_bits(longest))
    # What is even stays so, and nothing becomes longer than the longest.
    rows = sequences * longest if is_even else min(rows, sequences * longest)
    return Shape(rows, sequences, longest, traits.heads, traits.causal)


def _five_bits(count: int) -> int:
    shift = max(0, count.bit_length() - 5)
    return ((count + (1 << shift) - 1) >> shift) << shift


@lru_cache(maxsize=16384)
def _decide(traits: Traits, shape: Shape | None) -> tuple[AttentionBackend, ...]:
    """The order for a class of shapes."""
    usable = usable_backends(traits)
    capability = _capability(traits.device)
    table = choice_table.load(*capability) if capability is not None else None
    times = {} if table is None or shape is None else table_times(table, traits, shape)
    times = {name: time for name, time in times.items() if name in usable}
    others = unmeasured_order(capability, 0 if shape is None else shape.longest)
    names = [*sorted(times, key=lambda name: times[name]), *(name for name in others if name not in times)]
    names += [name for name in usable if name not in names]
    if "reference" not in times:  # behind every other one, those that no order lists included
        names.sort(key=lambda name: name == "reference")
    ranked = [usable[name] for name in names if name in usable]
    if ranked[0].name == "reference" and traits.device.type == "cuda":
        _warn_of_reference(traits)
    _log.debug(
        "varlen_attention: %s for %s, %s; by the table: %s microseconds", ranked[0].name, traits, shape, times
    )
    return tuple(ranked)


@lru_cache(maxsize=4096)
def _warn_of_reference(traits: Traits) -> None:
    """Say once for such calls that they are slow."""
    _log.warning(
        "varlen_attention takes the reference, which is slow and quadratic in all tokens: no other backend can serve "
        "%s. explain_backends says why; backend='reference' asks for it without this warning.",
        traits,
    )


def table_times(table: choice_table.Table, traits: Traits, shape: Shape) -> dict[str, float]:
    """The measured backends' microseconds for such a call."""
    kind = choice_table.kind_of(traits.head_dim, traits.v_dim, traits.causal, traits.kv_heads != traits.heads)
    nearest = choice_table.nearest_kind(table.kinds, kind)
    if nearest is None:
        return {}
    costs = table.kinds[nearest]
    found = costs.of_any
    if shape.longest <= WINDOW:
        found = found | costs.of_windows.get(window_form(shape), {})
    return {name: microseconds(cost, shape, table.processors) for name, cost in found.items()}


def forget_choices() -> None:
    """Drop what was decided, for tests that install or break a backend."""
    rank.cache_clear()
    _decide.cache_clear()
    _warn_of_reference.cache_clear()
    _capability.cache_clear()


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
    """The traits of a call that is described, with what ``varlen_attention`` would refuse of it refused."""
    kv_heads = heads if kv_heads is None else kv_heads
    v_dim = head_dim if v_dim is None else v_dim
    _check_counts(1, head_dim=head_dim, v_dim=v_dim, heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        raise ArgumentError(f"{_OP}: heads ({heads}) must be a multiple of kv_heads ({kv_heads}).")
    for name, flag in (("causal", causal), ("gradient", gradient)):
        checks.check_flag(_OP, name, flag)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{_OP}: device must be a device or its name, got {device!r}: {error}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ArgumentError(f"{_OP}: there is no {device} here; PyTorch sees {count} CUDA devices.")
        if device == torch.device("cuda"):  # no index given
            device = torch.device("cuda", torch.cuda.current_device())
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in checks.ATTENTION_DTYPES:
        names = ", ".join(str(one) for one in checks.ATTENTION_DTYPES)
        raise ArgumentError(f"{_OP}: dtype must be one of {names}, got {dtype!r}.")
    return Traits(device, dtype, head_dim, v_dim, heads, kv_heads, causal, gradient)


def _check_counts(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or not least <= count < 1 << 63:
            shown = count if type(count) is not int or count < 1 << 63 else "a larger one"
            raise ArgumentError(
                f"{_OP}: {name} must be a Python int of at least {least} below 2^63, got {shown!r}."
            )


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
        tokens: Rows of q.
        batch: Sequences.
        max_seqlen: The longest sequence.
        causal: Whether a row sees only itself and earlier ones.
        gradient: Whether a gradient is needed.
        backend: A name asked for; it is checked and returned. None is what a context manager or the environment asks
            for, and else the measured choice.

    Returns:
        The name.

    Raises:
        UnknownBackend: No backend has the name asked for.
        UnusableBackend: It, or every backend, can't serve the call; the message lists the reasons.
        BrokenBackend: A package is installed and can't be imported.
        GradientError: A gradient is needed and the backend asked for has none.
        ArgumentError: What is asked for is ``"measure"``; or there can't be such a call.
    """
    traits = _make_traits(device, dtype, head_dim, v_dim, heads, kv_heads, causal, gradient)
    _check_counts(0, tokens=tokens, batch=batch, max_seqlen=max_seqlen)
    if backend is not None:
        settings.check_name(backend)
    name, origin = (backend, "") if backend is not None else settings.asked_for()
    if name == settings.MEASURE:
        raise ArgumentError(
            "select_backend can't say what backend='measure' will find: it needs a call's tensors. Name a "
            "backend, or None."
        )
    if name is not None:
        try:
            return _require(name, traits).name
        except OpError as error:
            raise settings.with_origin(error, name, origin) from error
    return rank(traits, tokens, batch, max_seqlen)[0].name


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

    Raises:
        ArgumentError: There can't be such a call.
    """
    return reports(_make_traits(device, dtype, head_dim, v_dim, heads, kv_heads, causal, gradient))
