"""Places in a model where something is replaced, and what all of them share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from mmgraph.capture import BucketGrid, CapturedEncoder
from mmgraph.errors import OptionError
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.ops.attention.registry import backend_names
from mmgraph.towers.rewrites import Rewrites

#: What models hand to their towers along with what is for the language model; it changes nothing there.
HARMLESS = frozenset({"return_dict", "use_cache", "cache_position"})

__all__ = ["HARMLESS", "Options", "Site", "asked_in_configuration", "served"]


@dataclass(frozen=True)
class Options:
    """What `accelerate` was asked for.

    Attributes:
        capture: Whether towers are captured: True, False, or "auto" for on a GPU.
        buckets: The buckets of all towers, or by the name of the site.
        max_tokens: Patches of the largest bucket of a packed tower, where `buckets` says nothing.
        max_images: Images, or clips, of the largest bucket of other towers.
        rewrites: Which rewrites packed towers run with.
        backend: The attention backend, or None for the library's choice.
        merge: Whether the merge is replaced.
        progress: Show a progress bar at the capture.
        manager: Options of `CaptureManager`.
    """

    capture: bool | Literal["auto"] = "auto"
    buckets: BucketGrid | Mapping[str, BucketGrid] | None = None
    max_tokens: int = 16384
    max_images: int = 16
    rewrites: Rewrites = field(default_factory=Rewrites)
    backend: str | None = None
    merge: bool = True
    progress: bool = False
    manager: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capture not in (True, False, "auto") or not isinstance(self.capture, (bool, str)):
            raise OptionError(f"capture must be True, False or 'auto', got {self.capture!r}")
        for name in ("max_tokens", "max_images"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.rewrites, Rewrites):
            raise OptionError(f"rewrites must be a Rewrites record, got {self.rewrites!r}")
        if self.backend is not None and self.backend not in backend_names():
            raise OptionError(
                f"backend must be None or one of {', '.join(backend_names())}, got {self.backend!r}"
            )
        grids = self.buckets.values() if isinstance(self.buckets, Mapping) else [self.buckets]
        if not all(grid is None or isinstance(grid, BucketGrid) for grid in grids):
            raise OptionError(
                f"buckets must be a BucketGrid, or one by an encoder's name, got {self.buckets!r}"
            )

    def check_names(self, names: Collection[str]) -> None:
        """Raises OptionError for buckets of an encoder that there isn't."""
        unknown = (
            [name for name in self.buckets if name not in names] if isinstance(self.buckets, Mapping) else []
        )
        if unknown:
            raise OptionError(
                f"buckets name {', '.join(unknown)}, and the model's encoders are {', '.join(names)}"
            )

    def captures(self, device: torch.device) -> bool:
        """Whether a tower on a device is captured."""
        return device.type == "cuda" if self.capture == "auto" else self.capture

    def grid(self, name: str, default: BucketGrid) -> BucketGrid:
        """The buckets of a site."""
        if isinstance(self.buckets, BucketGrid):
            return self.buckets
        return default if self.buckets is None else self.buckets.get(name, default)


class Site(Protocol):
    """One place.

    Attributes:
        name: Its module's dotted name within the model.
        family: What it was recognised as.
        encoder: What serves it, once installed; None where it isn't captured.
    """

    name: str
    family: str
    encoder: CapturedEncoder | None

    def install(self, patches: Patches) -> None:
        """Puts the fast way in place; whatever fails leaves the model as it was."""

    def close(self) -> None:
        """Drops graphs and gives weights back their memory."""


def served(module: nn.Module, kwargs: Mapping[str, Any], known: frozenset[str]) -> str | None:
    """Why a call must run as transformers runs it, or None.

    Args:
        module: The tower.
        kwargs: Keywords of the call.
        known: Those that change nothing here.
    """
    if torch.compiler.is_compiling():
        return "it is being compiled"
    asked = [
        name for name, value in kwargs.items() if name not in known and value is not None and value is not False
    ]
    if asked:
        return f"it was asked for {', '.join(asked)}"
    if kwargs.get("return_dict") is False:
        return "a tuple was asked for"
    if module.training:
        return "it is in training mode"
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return "gradients are recorded"
    device = next(module.parameters()).device
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    return None


def asked_in_configuration(module: Any) -> str | None:
    """What a module's configuration asks of every call and the fast way hasn't got, or None."""
    config = getattr(module, "config", None)
    for asked in ("output_hidden_states", "output_attentions"):
        if getattr(config, asked, False):
            return f"its configuration asks for {asked}"
    return None
