"""A call whose caller writes the static inputs himself."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from .errors import CaptureError
from .into import Into
from .leases import Lease
from .spec import BucketSize, Offsets, Rows
from .store import Stored

if TYPE_CHECKING:
    from .serving import Server

__all__ = ["COPY", "LEASE", "STAGES", "Staged", "in_stage"]

COPY, LEASE = "copy", "lease"

# How many stages this thread is in, of any managers.
STAGES = threading.local()


def in_stage() -> bool:
    """Whether this thread is within a stage of some manager."""
    return getattr(STAGES, "depth", 0) > 0


class Staged:
    """Static inputs for one call of given sizes."""

    def __init__(self, server: Server, stored: Stored, sizes: list[int]) -> None:
        self._server, self.stored, self._sizes = server, stored, sizes
        stored.replayer.enter()

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """Argument name to a pytree of views of the static inputs, cut to the call's sizes.

        What isn't a tensor is the call's size, or None for a constant.
        """
        core, stored = self._server.core, self.stored
        generation = stored.generation
        named = dict(zip(core.grid.names, self._sizes, strict=True))
        leaves: list[Any] = []
        for leaf, layout, view in zip(
            core.signature.inputs, generation.layouts, stored.graph.inputs, strict=True
        ):
            if layout is None or view is None:
                leaves.append(named[leaf.spec.dim] if isinstance(leaf.spec, BucketSize) else None)
                continue
            if isinstance(leaf.spec, (Rows, Offsets)):
                axis = leaf.spec.axis if isinstance(leaf.spec, Rows) else 0
                view = view.narrow(axis, 0, layout.length(named))
            leaves.append(view)
        return core.signature.arguments(leaves)

    def _check(self) -> None:
        if self._server.core.staged is not self:
            raise CaptureError("this stage is over, and its inputs are another call's: replay within its block")

    def replay(self) -> Any:
        """The results, as copies.

        Raises:
            CaptureError: the block has ended.
        """
        self._check()
        return self._server.replay_staged(self.stored, self._sizes, COPY)

    def lease(self) -> Lease:
        """The results, as a lease."""
        self._check()
        lease: Lease = self._server.replay_staged(self.stored, self._sizes, LEASE)
        return lease

    def into(self, out: Any) -> Any:
        """The results, in the caller's tensors."""
        self._check()
        return self._server.replay_staged(self.stored, self._sizes, Into(out))
