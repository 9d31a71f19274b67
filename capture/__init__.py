"""Graph capture and replay per bucket. Import this package as ``mmgraph.capture``."""

if __name__ != "mmgraph.capture":
    raise ImportError(
        f"this package keeps process-wide capture state and must be imported once, as 'mmgraph.capture', "
        f"not as {__name__!r}: write 'import mmgraph.capture'"
    )

from .adapters import EncoderAdapter
from .buckets import (
    ENCODER_BATCH_BUCKETS,
    ENCODER_SEQLEN_BUCKETS,
    Bucket,
    BucketGrid,
    DroppedBucket,
    round_up_to_bucket,
)
from .encoder import CapturedEncoder, EncoderReport
from .errors import (
    AdapterError,
    BucketError,
    CallError,
    CallGradientError,
    CaptureError,
    CaptureFailedError,
    MemoryBoundError,
    MissError,
    MissingPackageError,
    NotCapturableError,
    OutputError,
    PaddingLeakError,
    SpecError,
    StaleLeaseError,
    StaleWeights,
    VerificationError,
)
from .leases import Lease
from .manager import CaptureManager
from .metrics import HistogramSnapshot
from .packing import Pack, Packer
from .policies import BucketPolicy, Candidate, Choice, cost_aware, exact, smallest
from .prometheus import prometheus_collector
from .report import BucketReport, CallExplanation, Report
from .spec import Spec, bucket_size, constant, offsets, rows, static
from .staged import Staged
from .tower import EncoderPack

__all__ = [
    "ENCODER_BATCH_BUCKETS",
    "ENCODER_SEQLEN_BUCKETS",
    "AdapterError",
    "Bucket",
    "BucketError",
    "BucketGrid",
    "BucketPolicy",
    "BucketReport",
    "CallError",
    "CallExplanation",
    "CallGradientError",
    "Candidate",
    "CaptureError",
    "CaptureFailedError",
    "CaptureManager",
    "CapturedEncoder",
    "Choice",
    "DroppedBucket",
    "EncoderAdapter",
    "EncoderPack",
    "EncoderReport",
    "HistogramSnapshot",
    "Lease",
    "MemoryBoundError",
    "MissError",
    "MissingPackageError",
    "NotCapturableError",
    "OutputError",
    "Pack",
    "Packer",
    "PaddingLeakError",
    "Report",
    "Spec",
    "SpecError",
    "Staged",
    "StaleLeaseError",
    "StaleWeights",
    "VerificationError",
    "bucket_size",
    "constant",
    "cost_aware",
    "exact",
    "offsets",
    "prometheus_collector",
    "round_up_to_bucket",
    "rows",
    "smallest",
    "static",
]
