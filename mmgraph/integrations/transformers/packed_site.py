"""A packed vision tower in its model's place: the same call, the same result record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import CapturedEncoder
from mmgraph.integrations.transformers.attention import register_attention
from mmgraph.integrations.transformers.packed_families import parts_of
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.integrations.transformers.sites import HARMLESS, Options, asked_in_configuration, served
from mmgraph.integrations.transformers.unchanged import Unchanged
from mmgraph.towers.buckets import example_item, packed_grid
from mmgraph.towers.grids import grids_of
from mmgraph.towers.items import PatchItem, joined
from mmgraph.towers.packed import PackedTower, item_tokens

__all__ = ["PackedSite"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Result:
    """One item's part of a tower's outputs."""

    rows: Tensor
    deep: tuple[Tensor, ...]
    last: Tensor


class _Tower(PackedTower):
    """Splits into what transformers' record is made of."""

    def split(self, outputs: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        counts = [item_tokens(item.grid) for item in items]
        merged = [count // self.unit for count in counts]
        rows = outputs["rows"].split(merged)
        last = outputs["last"].split([count // self.parts.last_per for count in counts])
        deep = [level.split(merged) for level in outputs["deep"]]
        return [_Result(one, tuple(level[i] for level in deep), last[i]) for i, one in enumerate(rows)]


class PackedSite:
    """Replaces the forward of a packed tower.

    Args:
        name: The tower's dotted name.
        visual: The tower.
        options: What was asked for.

    Raises:
        UnsupportedModelError: The tower isn't built as known.
    """

    def __init__(self, name: str, visual: Any, options: Options) -> None:
        self.name, self.family = name, type(visual).__name__
        self.visual, self.options = visual, options
        self.encoder: CapturedEncoder | None = None
        self.tower: _Tower | None = None
        self._forward: Callable[..., Any] = visual.forward
        self.fallbacks: Counter[str] = Counter()
        self._unchanged: Unchanged | None = None
        self._parts = parts_of(visual, options.backend)

    def install(self, patches: Patches) -> None:
        """See `Site`."""
        tower = _Tower(self._parts, rewrites=self.options.rewrites, keep_last=True, deep_beside=False)
        self.tower = tower
        self._unchanged = Unchanged([self.visual])
        try:
            if self.options.captures(tower.device):
                self.encoder = self._captured(tower)
        except BaseException:
            self.close()
            raise
        register_attention()
        patches.replace(self.visual, "forward", self.forward)

    def _captured(self, tower: _Tower) -> CapturedEncoder:
        options = self.options
        grid = options.grid(self.name, packed_grid(options.max_tokens, tower))
        encoder = CapturedEncoder(tower, buckets=grid, watch=[self.visual], **options.manager)
        try:
            encoder.precompile([example_item(tower)], progress=options.progress)
        except BaseException:
            encoder.close()
            raise
        return encoder

    def close(self) -> None:
        """See `Site`."""
        if self.encoder is not None:
            self.encoder.close()
            self.encoder = None
        if self.tower is not None:
            self.tower.part()
            self.tower = None

    def forward(self, hidden_states: Tensor, grid_thw: Any, **kwargs: Any) -> Any:
        """As the tower's own forward.

        Args:
            hidden_states: ``[patches, values of a patch]``.
            grid_thw: ``[images or videos, 3]``. On a device it is read back, which waits: give it on the host.
            **kwargs: What the tower's own forward takes; what the fast way hasn't got runs the tower's own.

        Returns:
            transformers' record, with ``pooler_output`` and ``last_hidden_state``.
        """
        if torch.compiler.is_compiling():
            return self._forward(hidden_states, grid_thw, **kwargs)
        tower, encoder = self.tower, self.encoder  # another thread may restore meanwhile
        reason = "it was restored" if tower is None else self._why_not(hidden_states, kwargs)
        if tower is None or reason is not None:
            self._tell(str(reason))
            return self._forward(hidden_states, grid_thw, **kwargs)
        grids = grids_of(grid_thw, allow_sync=True)
        counts = [item_tokens(grid) for grid in grids]
        if not grids or sum(counts) != hidden_states.shape[0]:
            self._tell("its patches and grids don't fit")
            return self._forward(hidden_states, grid_thw, **kwargs)
        parts = hidden_states.split(counts)
        items = [PatchItem(patches, grid) for patches, grid in zip(parts, grids, strict=True)]
        with torch.no_grad():
            if encoder is not None:
                results = encoder(items)
            else:
                results = tower.split(tower.forward(**tower.prepare(items, None)), items)
        return self._record(results)

    def _why_not(self, hidden_states: Tensor, kwargs: Mapping[str, Any]) -> str | None:
        """Why a call runs as transformers runs it, or None."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            return "gradients of the pixels are recorded"
        if kwargs.get("return_dict") is None and not getattr(self.visual.config, "return_dict", True):
            return "a tuple was asked for"
        changed = self._unchanged.why_not() if self._unchanged is not None else None
        return served(self.visual, kwargs, HARMLESS) or asked_in_configuration(self.visual) or changed

    def _record(self, results: Sequence[_Result]) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        rows = joined([one.rows for one in results])
        last = joined([one.last for one in results])
        if not hasattr(self.visual, "deepstack_merger_list"):
            return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=rows)
        record = _deepstack_record(self.visual)
        levels = len(results[0].deep) if results else 0
        deep = [joined([one.deep[level] for one in results]) for level in range(levels)]
        return record(last_hidden_state=last, pooler_output=rows, deepstack_features=deep)

    def _tell(self, reason: str) -> None:
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.info("%s runs as transformers has it: %s", self.name, reason)


def _deepstack_record(visual: Any) -> Any:
    import importlib

    return importlib.import_module(type(visual).__module__).BaseModelOutputWithDeepstackFeatures
