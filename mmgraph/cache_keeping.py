"""The embedder's rows in a cache that stands in a pool's place.

Promises: a batch has its rows whatever the cache does: what it declines, what it fails at and what is never shared is
kept on the item, as without a cache. What was pinned is unpinned once, also if the batch is lost. A cache's own failure
is logged, and no request's.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.errors import MultimodalError, RowsError
from mmgraph.items import MultimodalDataItem, describe_item
from mmgraph.keeping import checked_items, levels_by_modality, request_error
from mmgraph.layouts import Layout, Wanted, listed_layout
from mmgraph.modality import Modality
from mmgraph.planning import EncodePlan
from mmgraph.row_cache import RowCache, Rows
from mmgraph.rows import cut_rows
from mmgraph.stored_rows import Spent, StoredKeeper, Unshared, leave, own_rows

_log = logging.getLogger(__name__)
T = TypeVar("T")


def _tried(call: Callable[[], T], what: str) -> T | None:
    """Call a cache; give None where it fails, which is logged."""
    try:
        return call()
    except Exception:
        _log.warning("a cache's %s failed; the batch goes on without it", what, exc_info=True)
        return None


class Pins:
    """Pins in a cache, taken back by `release`, or a little later when they are lost.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: RowCache) -> None:
        self._keys: list[Hashable] = []
        self._cache = cache
        weakref.finalize(self, leave, partial(_unpin, cache, self._keys)).atexit = False

    def pin(self, key: Hashable) -> bool:
        """Pin what is stored under a key; False where nothing is, or the cache fails."""
        if not _tried(lambda: self._cache.pin(key), "pin"):
            return False
        self._keys.append(key)
        return True

    def release(self) -> None:
        """Take all pins back."""
        _unpin(self._cache, self._keys)


def _unpin(cache: RowCache, keys: list[Hashable]) -> None:
    while keys:
        _tried(partial(cache.unpin, keys.pop()), "unpin")


class CacheKeeper(StoredKeeper):
    """One batch's rows in an external cache: what is fetched and pinned, and what is put.

    Args:
        cache: The cache.
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items that were encoded, with the features that they keep, or None.
    """

    def __init__(self, cache: RowCache, keeps_features: bool, spent: Spent) -> None:
        super().__init__(keeps_features, spent)
        self.cache = cache
        self._rows: dict[MultimodalDataItem, Rows] = {}
        self._pins = Pins(cache)

    def find(self, plan: EncodePlan) -> dict[MultimodalDataItem, MultimodalError]:
        """Pin and fetch what is stored."""
        for item in plan.items:
            key = self.key(item)
            if item not in self._rows and not isinstance(key, Unshared) and self._pins.pin(key):
                found = _tried(partial(self.cache.get, key), "get")
                if found is not None:
                    self._rows[item] = found
        return {}

    def open(
        self, plan: EncodePlan, specs: Mapping[Modality, EncoderSpec], model: Any, width: int | None
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Fetch what is stored and fits; take rows that items bring along."""
        failures = self.find(plan)
        levels = levels_by_modality(specs, model, plan.items)
        for item in plan.items:
            found = self._rows.get(item)
            wrong = "" if found is None else _misfit(found, item.num_tokens, width, levels[item.modality])
            if wrong:
                del self._rows[item]
                self._misfits[item] = wrong
            source = None if item in self._rows else own_rows(plan, item)
            if source is not None:
                errors = checked_items(plan, [source], levels, width)
                failures |= dict.fromkeys([item], *errors.values()) if errors else {}
                if not errors:
                    self._rows[item] = Rows(source.encoded, source.encoded_deepstack)
        return failures

    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows were fetched or encoded."""
        return item in self._rows

    def reserve(
        self, plan: EncodePlan, items: Sequence[MultimodalDataItem], *, isolate: bool
    ) -> dict[MultimodalDataItem, MultimodalError]:
        """Do nothing: a cache that has no room declines to keep rows."""
        return {}

    def room(self, items: Sequence[MultimodalDataItem], width: int | None) -> None:
        """Give none: each item's rows have memory of their own."""

    def keep(
        self,
        items: Sequence[MultimodalDataItem],
        rows: torch.Tensor,
        deep: torch.Tensor | None,
        *,
        written: bool = False,
    ) -> None:
        """Put each item's rows, in memory of their own, or keep them on the item."""
        counts = [item.num_tokens for item in items]
        deep_parts = [None] * len(items) if deep is None else cut_rows(deep, counts)
        for item, part, deep_part in zip(items, cut_rows(rows, counts), deep_parts, strict=True):
            key, made = self.key(item), Rows(part, deep_part)
            if not isinstance(key, Unshared) and item not in self._misfits:
                _tried(partial(self.cache.put, key, made), "put")
                if self._pins.pin(key):
                    self._rows[item] = made
                    continue
            item.encoded, item.encoded_deepstack = part, deep_part
            self._rows[item] = made

    def share(self, plan: EncodePlan) -> int:
        """Give twins what is kept on their item; count the twins of items that are there."""
        for item, twins in plan.aliases_by_canonical.items():
            for twin in twins if item in self._rows and item.encoded is not None else ():
                twin.encoded, twin.encoded_deepstack = item.encoded, item.encoded_deepstack
        return super().share(plan)

    def cancel(self) -> None:
        """Do nothing: no room was taken."""

    def check(self, plan: EncodePlan, item: MultimodalDataItem, width: int, levels: int) -> None:
        """Raise RowsError unless an item's rows are there and fit."""
        if not self.has(item):
            raise self.missing_error(plan, item)
        wrong = _misfit(self._rows[item], item.num_tokens, width, levels)
        if wrong:
            error = RowsError(
                f"{describe_item(item)}: its rows are {wrong}; encode the plan with these encoders"
            )
            raise request_error(plan, item, error)

    def layout(self, wanted: Wanted) -> Layout:
        """Lay out the tensors of the cache."""

        def rows_of(item: MultimodalDataItem) -> torch.Tensor:
            rows = self._rows[item]
            return rows.deepstack if wanted.is_deep and rows.deepstack is not None else rows.main

        return listed_layout(wanted, rows_of)

    def hold(self, item: MultimodalDataItem) -> Pins | None:
        """Pin an item once more."""
        pins = Pins(self.cache)
        return pins if not isinstance(self.key(item), Unshared) and pins.pin(self.key(item)) else None

    def release(self) -> None:
        """Take the batch's pins back."""
        self.released = True
        self._rows.clear()
        self._pins.release()


def _misfit(rows: Any, tokens: int, width: int | None, levels: int) -> str:
    """Say what rows from a cache are in place of what they should be; nothing if they fit."""
    if not isinstance(rows, Rows):
        return f"{type(rows).__name__} in place of mmgraph.row_cache.Rows"
    for name, part, wide in (("rows", rows.main, width), ("deepstack rows", rows.deepstack, None)):
        if part is None and name != "rows" and not levels:
            continue
        if not isinstance(part, torch.Tensor) or part.layout != torch.strided or part.is_meta:
            return f"{name} of type {type(part).__name__} in place of a tensor"
        if name != "rows" and levels:
            wide = (rows.main.shape[-1] if width is None else width) * levels
        if not part.is_floating_point() or part.dim() != 2 or part.shape[0] != tokens:
            return f"{name} {part.dtype} {list(part.shape)} in place of [{tokens}, width]"
        if wide is not None and part.shape[1] != wide and (name == "rows" or levels):
            return f"{name} {list(part.shape)} in place of [{tokens}, {wide}]"
    return ""
