"""What the FlashAttention backends share: inputs as their kernels need them, outputs as the contract says.

The kernels take half precision, widths that are multiples of 8, 16-byte aligned rows with adjacent columns, and scales
above zero. They leave rows behind the last sequence unwritten; ``finish`` clears them without a synchronisation.

They use the offsets as they are given and check none: offsets that decrease, don't start at 0 or end behind the tokens
make them read and write outside their tensors. ``finish`` records such offsets, but only afterwards. Clamping them
before would take one more launch on every call, some microseconds of the host's time, to guard against a mistake that
callers can rule out where they make the offsets.
"""

import torch
from torch.nn.attention import current_flash_attention_impl

from mmgraph.ops.attention.registry import Traits
from mmgraph.ops.attention.zero_tail import close_tail, triton_package, zero_tail
from mmgraph.ops.errors import UnusableBackend

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_WIDTH = 256


def padded_width(head_dim: int, v_dim: int) -> int:
    """The one width that kernels with one width for q, k and v get."""
    return -(-max(head_dim, v_dim) // 8) * 8


def widen(tensor: Tensor, width: int) -> Tensor:
    """The tensor with that width, and 16-byte aligned rows: itself where it is so already."""
    if tensor.shape[2] != width:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[2]))
    row, head, column = tensor.stride()
    aligned = column == 1 and head % 8 == 0 and row % 8 == 0 and tensor.data_ptr() % 16 == 0
    expanded = row == 0 or head == 0  # kernels that copy by descriptors may not take them
    return tensor if aligned and not expanded else tensor.clone(memory_format=torch.contiguous_format)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale that is positive, which the kernels need: with another they give NaN."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """q, k, v, offsets and scale as kernels with one width need them; each is itself where it is so already."""
    width = padded_width(q.shape[2], v.shape[2])
    q, scale = positive_scale(q, scale)
    return widen(q, width), widen(k, width), widen(v, width), cu_seqlens.contiguous(), scale


def finish(
    out: Tensor,
    lse: Tensor | None,
    v_dim: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    overhang: tuple[Tensor, Tensor, Tensor, float, bool] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs as the contract says: of v's width, contiguous, clear where no sequence covers.

    Args:
        out: ``[tokens, heads, width]``, of which the first ``v_dim`` columns count.
        lse: ``[heads, tokens]``, natural logarithms, or None.
        v_dim: Width of v.
        cu_seqlens: int32 ``[batch + 1]``, contiguous.
        max_seqlen: The longest length; offsets that can't be right for it are recorded in the error flag.
        overhang: q, k and v as the kernels got them, scale and causal, for kernels that read rows behind a sequence's
            end (see ``close_tail``).
    """
    if out.shape[2] != v_dim:
        out = out[:, :, :v_dim]
    out = out.contiguous()  # itself, unless it was padded or has the strides of a head-major q
    if overhang is None:
        zero_tail(out, cu_seqlens, max_seqlen)
    else:
        q, k, v, scale, causal = overhang
        close_tail(out, q, k, v, cu_seqlens, max_seqlen, scale, causal)
    if lse is not None:
        rows = torch.arange(out.shape[0], device=out.device)
        lse = torch.where(rows < cu_seqlens[-1], lse, float("-inf"))
    return out, lse


def check_pytorchs_kernels() -> None:
    """Raise UnusableBackend where the user switched PyTorch's attention to kernels that aren't its own.

    PyTorch calls FlashAttention 3 or 4 then, which read behind a sequence's end and compile at a first call.
    """
    other = current_flash_attention_impl()
    if other not in (None, "FA2"):
        raise UnusableBackend(
            f"PyTorch's FlashAttention was switched to {other} (torch.nn.attention.activate_flash_attention_impl), and "
            "PyTorch's own kernels are asked for: call restore_flash_attention_impl(), or name backend='fa3' or 'fa4'."
        )


def why_not_half(traits: Traits, largest: int = LARGEST_WIDTH) -> str | None:
    """The reason why dtype or widths don't suit, or None."""
    if traits.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {traits.dtype}"
    if padded_width(traits.head_dim, traits.v_dim) > largest:
        return f"it takes widths up to {largest}, not {max(traits.head_dim, traits.v_dim)}"
    return None


def why_not_clear() -> str | None:
    """The reason why ``finish`` can't run, or None."""
    if triton_package() is None:
        return "it clears the rows behind the last sequence with a Triton kernel, and triton isn't installed"
    return None


def why_not_nvidia(traits: Traits, majors: tuple[int, ...] | None = None) -> str | None:
    """The reason why the device doesn't suit, or None.

    Args:
        traits: What the call is like.
        majors: Compute capabilities, by their first number, that the kernels were built for; None is 8 or more.
    """
    if traits.device.type != "cuda" or torch.version.hip is not None:
        kind = "a GPU of another maker" if traits.device.type == "cuda" else traits.device.type
        return f"it needs an NVIDIA GPU, and the tensors are on {kind}"
    capability = torch.cuda.get_device_capability(traits.device)
    if majors is None and capability < (8, 0):
        return "it needs compute capability 8.0 or more"
    if majors is not None and capability[0] not in majors:
        wanted = " or ".join(f"{major}.x" for major in majors)
        return f"it needs compute capability {wanted}, and {traits.device} has {capability[0]}.{capability[1]}"
    return None
