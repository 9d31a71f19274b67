"""Tools for tests of code that puts multimodal rows in their places: strategies, an oracle, and checks by both.

Promises: the oracle shares no code with what it judges; importing this package needs hypothesis, which the extra
``mmgraph[testing]`` brings, and nothing else of mmgraph imports it.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "hypothesis":  # it is there, and something that it needs is not
        raise
    raise ImportError(
        "mmgraph.testing needs hypothesis, which isn't installed; install it with: pip install 'mmgraph[testing]'"
    ) from error

from mmgraph.testing import reference, strategies
from mmgraph.testing.batches import Batch, BatchCase, Chunk, ItemCase, RequestCase
from mmgraph.testing.cases import MapCase, MaskCase, RangesCase
from mmgraph.testing.explaining import ScatterMismatch
from mmgraph.testing.origins import SourceRange
from mmgraph.testing.plans import PlanMismatch, assert_plan_correct
from mmgraph.testing.scatter import assert_scatter_correct

__all__ = [
    "Batch",
    "BatchCase",
    "Chunk",
    "ItemCase",
    "MapCase",
    "MaskCase",
    "PlanMismatch",
    "RangesCase",
    "RequestCase",
    "ScatterMismatch",
    "SourceRange",
    "assert_plan_correct",
    "assert_scatter_correct",
    "reference",
    "strategies",
]
