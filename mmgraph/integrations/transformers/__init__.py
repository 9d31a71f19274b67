"""transformers' multimodal models, made faster by one call: ``accelerate(model)``, undone by ``restore(model)``."""

from mmgraph.integrations.transformers.accelerating import Acceleration, accelerate, restore
from mmgraph.integrations.transformers.attention import ATTENTION_NAME, register_attention
from mmgraph.towers.rewrites import Rewrites

__all__ = ["ATTENTION_NAME", "Acceleration", "Rewrites", "accelerate", "register_attention", "restore"]
