"""Where an embedder keeps rows: on the items, in an `EncoderPool`, or in a `RowCache`.

Promises: a plan has one keeper from its first phase to its assembly; what requests have begun to use is held until they
are through with it; features that were dropped are remembered, for the error of an item that was evicted.
"""

import weakref
from typing import Any

from mmgraph.errors import OptionError
from mmgraph.items import MultimodalDataItem
from mmgraph.keeping import ItemKeeper, Keeper
from mmgraph.planning import EncodePlan
from mmgraph.pool import EncoderPool
from mmgraph.pool_keeping import CacheKeeper, PoolKeeper
from mmgraph.row_cache import RowCache
from mmgraph.staging import FeatureMover
from mmgraph.unfinished import UnfinishedItems

_ON_ITEMS = ItemKeeper()


class RowHome:
    """One embedder's choice.

    Args:
        store: A pool, a cache, or None for the items.
        keep_features: Items in a pool or cache keep their features, so that they can be encoded again.
        mover: Brings rows to the pool's device.

    Raises:
        OptionError: The store is something else, or features are to be kept without one.
    """

    def __init__(self, store: EncoderPool | RowCache | None, keep_features: bool, mover: FeatureMover) -> None:
        if store is not None and not isinstance(store, EncoderPool | RowCache):
            raise OptionError(
                f"pool must be an EncoderPool, an object with get, put, pin and unpin (RowCache), or None, got "
                f"{type(store).__name__}"
            )
        if keep_features and store is None:
            raise OptionError("keep_features needs a pool: rows that are kept on items are never evicted")
        self.store = store
        self.keep_features = keep_features
        self.unfinished = UnfinishedItems()
        self._mover = mover
        self._spent: weakref.WeakSet[MultimodalDataItem] = weakref.WeakSet()

    def keeper(self) -> Keeper:
        """Give a keeper for one batch."""
        if self.store is None:
            return _ON_ITEMS
        self.unfinished.settle()
        if isinstance(self.store, EncoderPool):
            return PoolKeeper(self.store, self.keep_features, self._spent, self._mover)
        return CacheKeeper(self.store, self.keep_features, self._spent)

    def keeper_of(self, plan: EncodePlan) -> Keeper:
        """Give the keeper of a plan whose phases are called one by one; made at first use."""
        held: dict[str, Any] = vars(plan)
        home, keeper = held.get("_kept", (None, None))
        if home is not self:
            keeper = self.keeper()
            held["_kept"] = self, keeper
        made: Keeper = keeper
        return made

    def forget(self, plan: EncodePlan) -> None:
        """End a plan's use of its keeper, which was or will be released."""
        vars(plan).pop("_kept", None)

    def settled(self, plan: EncodePlan, keeper: Keeper) -> None:
        """Hold what later chunks need of a plan's rows, before its keeper is released."""
        if self.store is not None:
            self.unfinished.update(plan, keeper)
