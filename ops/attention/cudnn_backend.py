"""The flashinfer_cudnn backend: cuDNN's fused attention over ragged sequences, through NVIDIA's cuDNN frontend.

It is the attention that FlashInfer's cuDNN prefill reaches, called without FlashInfer: FlashInfer looks its plans up by
a key that leaves out the scale and the strides of k and v, and has one handle for all devices (``cudnn_plans`` has the
key used here).

Each sequence's place is an element offset per tensor, since q, k and v may be views with row strides of their own. One
small kernel makes all of them from ``cu_seqlens`` on the device, zeros the rows that no sequence covers, and records
offsets that can't be right, in front of cuDNN's. Nothing synchronises.

The workspace is allocated for each call, together with the offsets, from PyTorch's caching allocator: it belongs to
the call's stream, or to the pool of the graph that is being captured, so no two streams ever share one. Its size is
what the plan asks for, in place of a fixed 128 MiB.
"""

import torch

from mmgraph.ops.attention import cudnn_plans as plans
from mmgraph.ops.attention.flash_shared import DTYPES, positive_scale, why_not_nvidia
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.attention.zero_tail import triton_package
from mmgraph.ops.error_flag import Fault, flag_for
from mmgraph.ops.launching import launch
from mmgraph.ops.registration import kernel_module

Tensor = torch.Tensor

# The largest width of a head by the major compute capability; those not named have that of 9.
LARGEST_WIDTHS = {8: 128, 9: 256, 10: 128, 12: 128}
OLDEST_CUDNN = 90600  # ragged log-sum-exps
OLDEST_CUDNN_BELOW_HOPPER = 91801  # ragged tensors on compute capability 8.x

_PROGRAMS = 128
_BLOCK = 2048
_SLOTS = 128
_LONGEST = 2**31 - 1  # lengths are 32-bit; rounded up, one may not be


def ready(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    with_lse: bool,
) -> bool:
    """Whether this call, with arguments as ``forward`` gets them, could run inside a capture now; builds nothing."""
    batch = cu_seqlens.shape[0] - 1
    return plans.is_ready(plans.plan_key(q, k, v, batch, max_seqlen, scale, causal, with_lse))


def _taken(q: Tensor, k: Tensor, v: Tensor, scale: float, key: plans.PlanKey) -> list[Tensor]:
    """q, k and v as the key says that cuDNN gets them: where they are, or copied."""
    if scale <= 0:
        q = positive_scale(q, scale)[0].contiguous()
    taken = []
    for tensor, width in ((q, key.width), (k, key.width), (v, key.v_width)):
        if plans.lies_right(tensor, width):
            taken.append(tensor)
        elif tensor.shape[2] != width:
            taken.append(torch.nn.functional.pad(tensor, (0, width - tensor.shape[2])))
        else:
            taken.append(tensor.clone(memory_format=torch.contiguous_format))
    return taken


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
    """cuDNN's attention per sequence; zeros, and minus infinity in the log-sum-exps, where no sequence covers."""
    tokens, heads, _ = q.shape
    v_dim = v.shape[2]
    device = q.get_device()
    batch = cu_seqlens.shape[0] - 1
    key = plans.plan_key(q, k, v, batch, max_seqlen, scale, causal, with_lse)
    plan = plans.find_plan(key)
    q, k, v = _taken(q, k, v, scale, key)

    out = q.new_empty((tokens, heads, key.v_width))
    pitch = key.batch // 8 * 8 + 8  # whole 64-byte lines with room for batch + 1
    table_bytes = -(-6 * pitch * 8 // 256) * 256
    table = torch.empty((table_bytes + plan.workspace + 7) // 8, dtype=torch.int64, device=q.device)
    launch(
        kernel_module("attention.cudnn_kernels").prepare_kernel,
        _PROGRAMS,
        (out, cu_seqlens.contiguous(), flag_for(q.device), table),
        (tokens, batch, max_seqlen, key.batch, min(key.max_seqlen, _LONGEST), pitch),
        (key.q_stride, key.k_stride, key.v_stride),
        (heads, key.v_width, _PROGRAMS, _BLOCK, _SLOTS, plans.WIDE_OFFSETS, int(Fault.ATTENTION_OFFSETS)),
        num_warps=4,
    )
    start = table.data_ptr()
    row = pitch * 8
    lengths = start + 5 * row
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lengths, lengths]
    addresses += [start, start + row, start + 2 * row, start + 3 * row]
    if with_lse:
        stats = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
        addresses += [stats.data_ptr(), start + 4 * row]
    plans.run(plan, device, addresses, start + table_bytes)
    if key.v_width != v_dim:
        out = out[:, :, :v_dim].contiguous()
    return out, stats.t().contiguous() if with_lse else None


def _why_not(traits: Traits) -> str | None:
    reason = why_not_nvidia(traits)
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(traits.device)
    if traits.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {traits.dtype}"
    largest = LARGEST_WIDTHS.get(capability[0], LARGEST_WIDTHS[9])
    if max(traits.head_dim, traits.v_dim) > largest:
        return f"it takes widths up to {largest} on this GPU, not {max(traits.head_dim, traits.v_dim)}"
    if triton_package() is None:
        return "it makes cuDNN's offsets with a Triton kernel, and triton isn't installed"
    if plans.package() is None:
        return "nvidia-cudnn-frontend isn't installed"
    if not hasattr(getattr(plans.compiled(), "backend_graph", None), "_execute_with_raw_ptrs"):
        return "it was written for nvidia-cudnn-frontend 1.32, and the one installed lacks its compiled graph"
    oldest = OLDEST_CUDNN if capability >= (9, 0) else OLDEST_CUDNN_BELOW_HOPPER
    if plans.version() < oldest:
        return f"it needs cuDNN {_dotted(oldest)} or newer on this GPU, not {_dotted(plans.version())}"
    return None


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


BACKEND = AttentionBackend("flashinfer_cudnn", forward, _why_not, supports_gradient=True, ready=ready)
