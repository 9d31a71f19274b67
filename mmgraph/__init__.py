"""Custom ops and graph capture for multimodal models in PyTorch.

Names are imported at first use, so that ``import mmgraph`` loads neither torch nor triton nor touches a device.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mmgraph.assembling import PreparedBatch as PreparedBatch
    from mmgraph.budget import BudgetedBatch as BudgetedBatch
    from mmgraph.budget import fit_to_budget as fit_to_budget
    from mmgraph.budget import limit_plan as limit_plan
    from mmgraph.counters import EmbedCounters as EmbedCounters
    from mmgraph.embedder import DeepstackRows as DeepstackRows
    from mmgraph.embedder import EmbedResult as EmbedResult
    from mmgraph.embedder import EncoderSpec as EncoderSpec
    from mmgraph.embedder import MultimodalEmbedder as MultimodalEmbedder
    from mmgraph.embedder import VisionEmbedder as VisionEmbedder
    from mmgraph.encoder_attention import MultimodalEncoderAttention as MultimodalEncoderAttention
    from mmgraph.encoder_attention import VisionAttention as VisionAttention
    from mmgraph.errors import MultimodalError as MultimodalError
    from mmgraph.hashing import content_hash as content_hash
    from mmgraph.hashing import pad_value_for_hash as pad_value_for_hash
    from mmgraph.inputs import FeatureHandle as FeatureHandle
    from mmgraph.inputs import MultimodalDataItem as MultimodalDataItem
    from mmgraph.inputs import MultimodalForwardContext as MultimodalForwardContext
    from mmgraph.inputs import MultimodalInputs as MultimodalInputs
    from mmgraph.inputs import pad_input_tokens as pad_input_tokens
    from mmgraph.modality import Modality as Modality
    from mmgraph.planning import EncodePlan as EncodePlan
    from mmgraph.planning import ScatterRange as ScatterRange
    from mmgraph.planning import build_plan as build_plan
    from mmgraph.pool import EncoderPool as EncoderPool
    from mmgraph.row_cache import RowCache as RowCache
    from mmgraph.transport import ShmTensorHandle as ShmTensorHandle

_HOMES = {
    "DeepstackRows": "mmgraph.embedder",
    "EmbedResult": "mmgraph.embedder",
    "EncoderSpec": "mmgraph.embedder",
    "PreparedBatch": "mmgraph.assembling",
    "BudgetedBatch": "mmgraph.budget",
    "EmbedCounters": "mmgraph.counters",
    "fit_to_budget": "mmgraph.budget",
    "limit_plan": "mmgraph.budget",
    "MultimodalEmbedder": "mmgraph.embedder",
    "VisionEmbedder": "mmgraph.embedder",
    "MultimodalEncoderAttention": "mmgraph.encoder_attention",
    "VisionAttention": "mmgraph.encoder_attention",
    "MultimodalError": "mmgraph.errors",
    "content_hash": "mmgraph.hashing",
    "pad_value_for_hash": "mmgraph.hashing",
    "FeatureHandle": "mmgraph.inputs",
    "MultimodalDataItem": "mmgraph.inputs",
    "MultimodalForwardContext": "mmgraph.inputs",
    "MultimodalInputs": "mmgraph.inputs",
    "pad_input_tokens": "mmgraph.inputs",
    "Modality": "mmgraph.modality",
    "EncodePlan": "mmgraph.planning",
    "ScatterRange": "mmgraph.planning",
    "build_plan": "mmgraph.planning",
    "EncoderPool": "mmgraph.pool",
    "RowCache": "mmgraph.row_cache",
    "ShmTensorHandle": "mmgraph.transport",
}

_ROOMS = ("capture", "embedder", "errors", "inputs", "ops", "planning", "transport")

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"mmgraph.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
