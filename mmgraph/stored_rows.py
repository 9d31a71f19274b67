"""What the keepers of a pool and of a cache share: the keys of rows, whose features are gone, and pins that are lost.

Promises: an item's key is settled once in a batch, also if its hash changes meanwhile; an item that is never shared has
a key of its own; what an error says of an item that can't be encoded again is what happened to it.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from mmgraph.errors import EvictedError, MissingFeatureError, RowsError
from mmgraph.items import MultimodalDataItem, describe_item
from mmgraph.keeping import no_feature_error
from mmgraph.planning import EncodePlan

Spent = weakref.WeakKeyDictionary[MultimodalDataItem, Any]


class Unshared:
    """The key of an item that is never shared."""

    __slots__ = ("__weakref__",)


_unshared: weakref.WeakKeyDictionary[MultimodalDataItem, Unshared] = weakref.WeakKeyDictionary()


def key_of(item: MultimodalDataItem) -> Hashable:
    """Give the key of an item's rows in a pool or cache: its modality's value and hash; else one of its own."""
    if item.share_key is not None:
        return item.share_key
    return _unshared.setdefault(item, Unshared())


# What finalizers leave to be done, since they may run anywhere, also inside the cache that they concern.
_lost: deque[Callable[[], None]] = deque()


def leave(call: Callable[[], None]) -> None:
    """Leave a call for the next `settle_lost`."""
    _lost.append(call)


def settle_lost() -> None:
    """Do what finalizers have left."""
    while _lost:
        _lost.popleft()()


class StoredKeeper(ABC):
    """The common part of the keepers.

    Args:
        keeps_features: Whether items keep their features once they are encoded.
        spent: Items that were encoded, with the features that they keep, or None.
    """

    def __init__(self, keeps_features: bool, spent: Spent) -> None:
        self.keeps_features = keeps_features
        self.released = False
        self._spent = spent
        self._keys: dict[MultimodalDataItem, Hashable] = {}
        self._misfits: dict[MultimodalDataItem, str] = {}

    def key(self, item: MultimodalDataItem) -> Hashable:
        """Give the key that an item has in this batch."""
        return self._keys.setdefault(item, key_of(item))

    @abstractmethod
    def has(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item's rows are there."""

    def no_feature(self, plan: EncodePlan, item: MultimodalDataItem) -> MissingFeatureError:
        """Make the error of an item without a feature; one that was encoded before has been evicted."""
        request = plan.request_of(item)
        name = describe_item(item, request=request)
        if item in self._misfits:
            return MissingFeatureError(
                f"{name} has to be encoded, as what is stored of it is {self._misfits[item]}, and has no feature; give "
                "it one, or use a pool for each model",
                request=request,
            )
        if item not in self._spent:
            return no_feature_error(plan, item)
        return EvictedError(
            f"{name} was encoded before, its rows were evicted since (or stored under another hash), and its feature "
            "was dropped then; give the item its feature again, make an embedder with keep_features=True, or a larger "
            "pool",
            request=request,
        )

    def share(self, plan: EncodePlan) -> int:
        """Count the twins of items that are there: they have the items' keys."""
        return sum(len(twins) for item, twins in plan.aliases_by_canonical.items() if self.has(item))

    def done(self, item: MultimodalDataItem) -> None:
        """Remember the feature that an item's rows are of, which is dropped unless features are kept."""
        self._spent[item] = item.feature if self.keeps_features else None

    def has_new_feature(self, item: MultimodalDataItem) -> bool:
        """Tell whether an item was given a feature since its rows were made; it is then forgotten that they were."""
        if item.feature is None or item not in self._spent or self._spent[item] is item.feature:
            return False
        del self._spent[item]
        return True

    def missing_error(self, plan: EncodePlan, item: MultimodalDataItem) -> RowsError:
        """Make the error of an item whose rows should be there."""
        request = plan.request_of(item)
        return RowsError(
            f"{describe_item(item, request=request)} has no rows in the pool that this batch holds; encode the plan "
            "first",
            request=request,
        )


def own_rows(plan: EncodePlan, item: MultimodalDataItem) -> MultimodalDataItem | None:
    """Give the first of an item and its twins that brings rows along."""
    twins = (item, *plan.aliases_by_canonical.get(item, ()))
    return next((twin for twin in twins if twin.encoded is not None), None)
