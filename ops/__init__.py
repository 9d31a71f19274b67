"""Custom operators: attention, rotary positions, embedding assembly, and what is between products row by row.

Import this package as ``mmgraph.ops``.

Importing it registers every op and imports no kernel: Triton and the optional packages are imported by the first call
that needs them, and CUDA is not touched.
"""

if __name__ != "mmgraph.ops":
    raise ImportError(
        f"this package registers operators and must be imported once, as 'mmgraph.ops', not as {__name__!r}: "
        "write 'import mmgraph.ops'"
    )

from mmgraph.ops import schemas as _schemas  # noqa: F401 - defines every op before anything implements one
from mmgraph.ops.assembly import (
    assemble_embeddings,
    assemble_embeddings_out,
    deepstack_add,
    deepstack_add_,
    expand_ranges,
    merge_embeddings,
    store_rows,
)
from mmgraph.ops.attention import (
    BackendReport,
    attention_backend,
    explain_backends,
    select_backend,
    varlen_attention,
)
from mmgraph.ops.error_flag import check_errors, prepare_device
from mmgraph.ops.errors import (
    ArgumentError,
    BackendError,
    BrokenBackend,
    CountMismatchError,
    DataError,
    DeviceError,
    DuringCaptureError,
    GradientError,
    OpError,
    UnknownBackend,
    UnusableBackend,
)
from mmgraph.ops.rotary import packed_qkv_rope, packed_qkv_rope_
from mmgraph.ops.row_map import RowMap
from mmgraph.ops.rowwise import activation, add_norm, gated_activation, mix_rows, norm

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendReport",
    "BrokenBackend",
    "CountMismatchError",
    "DataError",
    "DeviceError",
    "DuringCaptureError",
    "GradientError",
    "OpError",
    "RowMap",
    "UnknownBackend",
    "UnusableBackend",
    "activation",
    "add_norm",
    "assemble_embeddings",
    "assemble_embeddings_out",
    "attention_backend",
    "check_errors",
    "deepstack_add",
    "deepstack_add_",
    "expand_ranges",
    "explain_backends",
    "gated_activation",
    "merge_embeddings",
    "mix_rows",
    "norm",
    "packed_qkv_rope",
    "packed_qkv_rope_",
    "prepare_device",
    "select_backend",
    "store_rows",
    "varlen_attention",
]
