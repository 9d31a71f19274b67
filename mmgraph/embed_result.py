"""What the embedder gives for a batch of which some requests may have failed."""

from dataclasses import dataclass, field
from typing import Any

import torch

from mmgraph.errors import MultimodalError


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """What ``apply_result`` gives.

    Attributes:
        embeds: ``[T, hidden]``, or None where the caller takes its text path.
        kwargs: Keywords for the language model.
        failed: The error of each request that was set aside, by index; its rows in ``embeds`` are text look-ups
            only and not to be used.
    """

    embeds: torch.Tensor | None
    kwargs: dict[str, Any] = field(default_factory=dict)
    failed: dict[int, MultimodalError] = field(default_factory=dict)
