"""Where an embedder keeps rows: on the items, in an `EncoderPool`, or in a `RowCache`.

Promises: a plan has one keeper from its first phase to its assembly, and one thread has it at a time; what requests
have begun to use is held until they are through with it; features that were dropped are remembered, for the error of an
item that was evicted.
"""

import weakref
from typing import Any

import torch

from mmgraph.cache_keeping import CacheKeeper, Pins
from mmgraph.errors import OptionError, PoolArgumentError
from mmgraph.items import MultimodalDataItem
from mmgraph.keeping import ItemKeeper, Keeper
from mmgraph.planning import EncodePlan
from mmgraph.pool import EncoderPool
from mmgraph.pool_keeping import PoolKeeper
from mmgraph.row_cache import RowCache
from mmgraph.staging import FeatureMover, settled
from mmgraph.stored_rows import Spent, Unshared, key_of, settle_lost
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
        if store is not None and (isinstance(store, type) or not isinstance(store, EncoderPool | RowCache)):
            raise OptionError(
                "pool must be an EncoderPool, an object with get, put, pin and unpin (RowCache), or None, got "
                f"{store if isinstance(store, type) else type(store).__name__}"
            )
        if keep_features and store is None:
            raise OptionError("keep_features needs a pool: rows that are kept on items are never evicted")
        self.store = store
        self.keep_features = keep_features
        self.unfinished = UnfinishedItems()
        self._mover = mover
        self._spent: Spent = weakref.WeakKeyDictionary()

    def check(self, device: torch.device) -> None:
        """Raise PoolArgumentError unless a pool is on the device of ``input_ids``."""
        if isinstance(self.store, EncoderPool) and self.store.device != settled(device):
            raise PoolArgumentError(
                f"input_ids are on {device} and the pool on {self.store.device}; make the pool on their device"
            )

    def stored(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows are there now; they may be evicted later."""
        if item.encoded is not None or self.store is None:
            return item.encoded is not None
        key = key_of(item)
        if isinstance(self.store, EncoderPool):
            return key in self.store
        pins = Pins(self.store)
        found = not isinstance(key, Unshared) and pins.pin(key)
        pins.release()
        return found

    def keeper(self) -> Keeper:
        """Give a keeper for one batch."""
        if self.store is None:
            return _ON_ITEMS
        settle_lost()
        if isinstance(self.store, EncoderPool):
            return PoolKeeper(self.store, self.keep_features, self._spent, self._mover)
        return CacheKeeper(self.store, self.keep_features, self._spent)

    def keeper_of(self, plan: EncodePlan) -> Keeper:
        """Give the keeper of a plan whose phases are called one by one; made at first use."""
        if self.store is None:
            return _ON_ITEMS
        held: dict[str, Any] = vars(plan)
        home, keeper = held.get("_kept", (None, None))
        if home is not self or keeper.released:
            keeper = self.keeper()
            held["_kept"] = self, keeper
        made: Keeper = keeper
        return made

    def take(self, plan: EncodePlan) -> Keeper:
        """Take a plan's keeper away from it, so that no other thread has it."""
        home, keeper = vars(plan).pop("_kept", (None, None))
        if home is not self or keeper.released:
            return self.keeper()
        taken: Keeper = keeper
        return taken

    def put_back(self, plan: EncodePlan, keeper: Keeper) -> None:
        """Give a plan its keeper back, after a failure."""
        if self.store is not None:
            vars(plan).setdefault("_kept", (self, keeper))

    def settled(self, plan: EncodePlan, keeper: Keeper) -> None:
        """Hold what later chunks need of a plan's rows, before its keeper is released."""
        if self.store is not None:
            self.unfinished.update(plan, keeper)
