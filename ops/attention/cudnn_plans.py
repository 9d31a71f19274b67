"""cuDNN's plans: what a call's plan depends on, how it is described to cuDNN's frontend, and which ones are kept.

A plan's key is everything that enters its graph (``PlanKey``), so that a call never runs another call's plan. The batch
and the longest length enter it rounded up to the encoder's buckets; the slots that this adds are sequences of length 0.

A plan is built by the first call that needs it, which takes a fraction of a second and loads code onto the device: not
inside a capture. ``cudnn_cache`` says which ones are kept.

The frontend's compiled graph is used directly. Its Python layer may choose an engine that isn't cuDNN's, and costs
several times as much a call.
"""

from collections.abc import Sequence
from ctypes import addressof, c_uint64
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mmgraph.ops.attention.cudnn_cache import PlanCache
from mmgraph.ops.attention.cudnn_handles import Handles
from mmgraph.ops.errors import DuringCaptureError, UnusableBackend
from mmgraph.ops.packages import import_package

Tensor = torch.Tensor

BATCH_BUCKETS = (8, 16, 32, 64)
SEQLEN_BUCKETS = (4096, 8192, 16384, 32768, 65536, 131072)
CAPACITY = 256
WIDE_OFFSETS = True  # 64-bit element offsets; with 32 bits a tensor may span 2**31 elements at most
WIDTH_UNIT = 8
# How cuDNN says that it has no kernel where the frontend raises no class of its own for it.
_REFUSALS = ("CUDNN_STATUS_NOT_SUPPORTED", "No valid engine configs")

# A tensor's id in the graph; cuDNN gets the addresses in this order.
_Q, _K, _V, _OUT, _Q_LENGTHS, _K_LENGTHS, _Q_OFFSETS, _K_OFFSETS, _V_OFFSETS, _OUT_OFFSETS = range(1, 11)
_STATS, _STATS_OFFSETS = 11, 12


class PlanKey(NamedTuple):
    """All that enters a plan: two calls share a plan only if they agree in every one of these.

    Alignment isn't among them, since every row of every head starts at a multiple of 16 bytes here.
    """

    device: int
    dtype: torch.dtype
    heads: int
    kv_heads: int
    width: int
    v_width: int
    q_stride: int
    q_head_stride: int
    k_stride: int
    k_head_stride: int
    v_stride: int
    v_head_stride: int
    batch: int
    max_seqlen: int
    scale: float
    causal: bool
    with_lse: bool
    version: int


class Plan(NamedTuple):
    """A graph that is ready to run, and the bytes of workspace that it needs."""

    graph: Any
    workspace: int


def round_up(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that is at least the value; beyond the last, the next multiple of the last."""
    for bucket in buckets:
        if value <= bucket:
            return bucket
    return multiple_of(buckets[-1], value)


def multiple_of(unit: int, value: int) -> int:
    """The smallest multiple of the unit that is at least the value."""
    return -(-value // unit) * unit


def lies_right(tensor: Tensor, width: int) -> bool:
    """Whether cuDNN can read a tensor where it is: of that width, rows at multiples of 16 bytes, and not expanded."""
    row, head, column = tensor.stride()
    in_units = row % 8 == 0 and head % 8 == 0 and row != 0 and head != 0
    return tensor.shape[2] == width and column == 1 and in_units and tensor.data_ptr() % 16 == 0


@lru_cache(maxsize=1)
def package() -> Any:
    """The frontend, or None where it isn't installed.

    Raises:
        BrokenBackend: It, or cuDNN itself, is installed and can't be loaded.
    """

    def load() -> Any:
        import cudnn

        if cudnn.__file__ is None:  # a folder of that name, not the package
            return None
        cudnn.backend_version()  # raises where the cuDNN library itself can't be loaded
        return cudnn

    return import_package("cudnn", load)


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The frontend's compiled part."""
    return package()._pybind_module


@lru_cache(maxsize=1)
def version() -> int:
    """cuDNN's version, as in 91900 for 9.19.0."""
    return int(package().backend_version())


def plan_key(
    q: Tensor, k: Tensor, v: Tensor, batch: int, max_seqlen: int, scale: float, causal: bool, with_lse: bool
) -> PlanKey:
    """The key of a call. Tensors that don't lie right, and a q whose sign changes, are copied and then contiguous."""
    _, heads, head_dim = q.shape
    _, kv_heads, v_dim = v.shape
    width, v_width = multiple_of(WIDTH_UNIT, head_dim), multiple_of(WIDTH_UNIT, v_dim)
    in_place = scale > 0 and lies_right(q, width)
    q_stride, q_head_stride = q.stride()[:2] if in_place else (heads * width, width)
    k_stride, k_head_stride = k.stride()[:2] if lies_right(k, width) else (kv_heads * width, width)
    v_stride, v_head_stride = v.stride()[:2] if lies_right(v, v_width) else (kv_heads * v_width, v_width)
    return PlanKey(
        q.get_device(),
        q.dtype,
        heads,
        kv_heads,
        width,
        v_width,
        q_stride,
        q_head_stride,
        k_stride,
        k_head_stride,
        v_stride,
        v_head_stride,
        round_up(batch, BATCH_BUCKETS),
        round_up(max_seqlen, SEQLEN_BUCKETS),
        abs(scale) if scale else 1.0,
        causal,
        with_lse,
        version(),
    )


def describe(graph: Any, key: PlanKey) -> None:
    """Put the tensors and the operation of a key into an empty graph of the frontend's."""
    types = package().data_type
    half = types.BFLOAT16 if key.dtype == torch.bfloat16 else types.HALF
    offsets_type = types.INT64 if WIDE_OFFSETS else types.INT32
    batch, longest = key.batch, key.max_seqlen

    def column(name: str, uid: int, length: int, data_type: Any) -> Any:
        return graph._make_tensor(
            dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, name=name, uid=uid
        )

    def ragged(name: str, uid: int, offsets: int, heads: int, width: int, stride: int, head_stride: int) -> Any:
        return graph._make_tensor(
            dim=[batch, heads, longest, width],
            stride=[longest * stride, head_stride, stride, 1],
            data_type=half,
            ragged_offset=column(name + "_offsets", offsets, batch + 1, offsets_type),
            name=name,
            uid=uid,
        )

    out, stats = graph.sdpa(
        q=ragged("q", _Q, _Q_OFFSETS, key.heads, key.width, key.q_stride, key.q_head_stride),
        k=ragged("k", _K, _K_OFFSETS, key.kv_heads, key.width, key.k_stride, key.k_head_stride),
        v=ragged("v", _V, _V_OFFSETS, key.kv_heads, key.v_width, key.v_stride, key.v_head_stride),
        seq_len_q=column("q_lengths", _Q_LENGTHS, batch, types.INT32),
        seq_len_kv=column("k_lengths", _K_LENGTHS, batch, types.INT32),
        use_padding_mask=True,
        attn_scale=key.scale,
        diagonal_band_right_bound=0 if key.causal else None,
        generate_stats=key.with_lse,
        compute_data_type=types.FLOAT,
        name="attention",
    )
    row = key.heads * key.v_width
    out.set_uid(_OUT).set_name("out").set_output(True).set_data_type(half)
    out.set_dim([batch, key.heads, longest, key.v_width]).set_stride([longest * row, key.v_width, row, 1])
    out.set_ragged_offset(column("out_offsets", _OUT_OFFSETS, batch + 1, offsets_type))
    if key.with_lse:
        stats.set_uid(_STATS).set_name("stats").set_output(True).set_data_type(types.FLOAT)
        stats.set_dim([batch, key.heads, longest, 1]).set_stride([longest * key.heads, 1, key.heads, 1])
        stats.set_ragged_offset(column("stats_offsets", _STATS_OFFSETS, batch + 1, offsets_type))


PLANS: PlanCache[PlanKey, Plan] = PlanCache(CAPACITY)
HANDLES = Handles(lambda: int(compiled().create_handle()))


def make_plan(key: PlanKey) -> Plan:
    """Build a plan on the current device; nothing is put on a stream.

    Raises:
        UnusableBackend: cuDNN has no kernel for it. Whatever else fails, as memory or the device, is raised as it is.
    """
    cudnn, types = package(), package().data_type
    handle = HANDLES.take(key.device)
    try:
        graph = compiled().backend_graph(
            name="mmgraph",
            io_data_type=types.BFLOAT16 if key.dtype == torch.bfloat16 else types.HALF,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle.number,
        )
        describe(graph, key)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return Plan(graph, int(graph.get_workspace_size()))
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _REFUSALS):
            raise
        raise UnusableBackend(
            f"attention backend 'flashinfer_cudnn' can't serve this call: cuDNN {cudnn.backend_version_string()} "
            f"builds no plan for {key}: {error}"
        ) from error
    finally:
        HANDLES.give(key.device, handle)


def is_ready(key: PlanKey) -> bool:
    """Whether a call with that key can run inside a capture now: its plan is built."""
    return key in PLANS


def find_plan(key: PlanKey) -> Plan:
    """The plan of a key, built now if it isn't yet.

    Raises:
        DuringCaptureError: It isn't built and the current stream is being captured.
        UnusableBackend: cuDNN has no kernel for it.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    plan = PLANS.find(key, capturing)
    if plan is not None:
        return plan
    if capturing:
        raise DuringCaptureError(
            "attention backend 'flashinfer_cudnn' must build cuDNN's plan for these shapes before a capture. Run the "
            "function once, with the same shapes, before capturing it."
        )
    return PLANS.build(key, make_plan)


def run(plan: Plan, device: int, addresses: Sequence[int], workspace: int) -> None:
    """Launch a plan on the current stream, with the tensors' addresses in the order of their ids."""
    pack = (c_uint64 * len(addresses))(*addresses)
    stream = torch._C._cuda_getCurrentRawStream(device)
    handle = HANDLES.take(device)
    try:
        if handle.stream != stream:  # setting it asks the driver for the stream's properties
            compiled()._raw_set_stream(handle.number, stream)
            handle.stream = stream
        plan.graph._execute_with_raw_ptrs(addressof(pack), len(addresses), workspace, handle.number)
    finally:
        HANDLES.give(device, handle)
