"""Graph capture and replay per bucket. Import this package as ``mmgraph.capture``."""

if __name__ != "mmgraph.capture":
    raise ImportError(
        f"this package keeps process-wide capture state and must be imported once, as 'mmgraph.capture', "
        f"not as {__name__!r}: write 'import mmgraph.capture'"
    )

from .buckets import (
    ENCODER_BATCH_BUCKETS,
    ENCODER_SEQLEN_BUCKETS,
    Bucket,
    BucketGrid,
    DroppedBucket,
    round_up_to_bucket,
)
from .errors import (
    BucketError,
    CallError,
    CallGradientError,
    CaptureError,
    CaptureFailedError,
    NotCapturableError,
    OutputError,
    SpecError,
)
from .manager import CaptureManager
from .report import BucketReport, CallExplanation, Report
from .spec import Spec, bucket_size, constant, offsets, rows, static

__all__ = [
    "ENCODER_BATCH_BUCKETS",
    "ENCODER_SEQLEN_BUCKETS",
    "Bucket",
    "BucketError",
    "BucketGrid",
    "BucketReport",
    "CallError",
    "CallExplanation",
    "CallGradientError",
    "CaptureError",
    "CaptureFailedError",
    "CaptureManager",
    "DroppedBucket",
    "NotCapturableError",
    "OutputError",
    "Report",
    "Spec",
    "SpecError",
    "bucket_size",
    "constant",
    "offsets",
    "round_up_to_bucket",
    "rows",
    "static",
]
