"""What all sites do that run transformers' own modules: their encoder, the calls they can't serve, and saying why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmgraph.capture import BucketGrid, CapturedEncoder
from mmgraph.integrations.transformers.attention import TowerAttention
from mmgraph.integrations.transformers.sites import HARMLESS, Options, asked_in_configuration, served
from mmgraph.integrations.transformers.unchanged import Unchanged

__all__ = ["TowerRunner", "Unserved"]

logger = logging.getLogger(__name__)

_NOTHING: frozenset[str] = frozenset()


class Unserved(Exception):
    """A call that must run as transformers runs it; says why."""


class TowerRunner:
    """Runs a tower's function, and tells which calls it can't serve.

    Args:
        name: The tower's dotted name, for buckets and reports.
        tower: The tower, whose attention becomes mmgraph's while the function runs.
        modules: All that the function runs: watched, and asked whether they train.
        options: What was asked for.
    """

    def __init__(self, name: str, tower: nn.Module, modules: Sequence[nn.Module], options: Options) -> None:
        self.name, self.modules, self.options = name, tuple(modules), options
        self.attention = TowerAttention(tower, options.backend)
        self.encoder: CapturedEncoder | None = None
        self.unchanged = Unchanged(self.modules)
        self.fallbacks: Counter[str] = Counter()

    def capture_with(self, adapter: Any, grid: BucketGrid, example: Any, device: torch.device) -> None:
        """Captures an adapter's function, where that was asked for.

        Args:
            adapter: The adapter.
            grid: Its buckets, where the options say nothing of them.
            example: An item.
            device: Where it runs.

        Raises:
            CaptureFailedError: It can't be captured.
        """
        if not self.options.captures(device):
            return
        buckets = self.options.grid(self.name, grid)
        encoder = CapturedEncoder(adapter, buckets=buckets, watch=list(self.modules), **self.options.manager)
        try:
            encoder.precompile([example], progress=self.options.progress)
        except BaseException:
            encoder.close()
            raise
        self.encoder = encoder

    def run(self, adapter: Any, items: Sequence[Any]) -> Sequence[Any]:
        """Each item's result: from graphs, or from one eager run of all."""
        encoder = self.encoder  # another thread may restore meanwhile
        with torch.no_grad():
            if encoder is not None:
                found: Sequence[Any] = encoder(items)
            else:
                found = adapter.split(adapter.forward(**adapter.prepare(items, None)), items)
        return found

    def close(self) -> None:
        """Drops the graphs."""
        if self.encoder is not None:
            self.encoder.close()
            self.encoder = None

    def check(self, given: Mapping[str, Any], config: Any, known: Collection[str]) -> None:
        """Looks at what a call asks for, and at what goes on around it.

        Args:
            given: The call's arguments by name.
            config: The configuration of what is called.
            known: Names of arguments that can be served.

        Raises:
            Unserved: Something must run as transformers runs it.
        """
        returns = given.get("return_dict")
        if returns is False or (returns is None and not getattr(config, "return_dict", True)):
            raise Unserved("a tuple was asked for")
        for name, value in given.items():
            if name not in known and name not in HARMLESS and value is not None and value is not False:
                raise Unserved(f"it was asked for {name}")
        for module in self.modules:
            reason = served(module, {}, _NOTHING) or asked_in_configuration(module)
            if reason is not None:
                raise Unserved(reason)
        reason = self.unchanged.why_not()
        if reason is not None:
            raise Unserved(reason)

    def as_it_was(self, reason: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs transformers' own, and says why, once for each reason."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.info("%s runs as transformers has it: %s", self.name, reason)
        with self.attention.as_before():
            return original(*args, **kwargs)
