"""`CapturedEncoder`: items in, a result for each out, by as few and as full replays as its buckets allow.

The items of a call are packed into the buckets that are captured; what none of them holds runs eagerly, alone. Results
stand in the order of the items, whatever was packed with what.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .adapters import EncoderAdapter
from .buckets import Bucket, BucketGrid
from .errors import CallError, CaptureError, SpecError
from .manager import CaptureManager
from .options import hashable
from .report import Report
from .tower import Cost, EncoderPack, Tower

__all__ = ["CapturedEncoder", "EncoderReport"]


@dataclass(frozen=True)
class EncoderReport:
    """What an encoder did so far.

    Attributes:
        calls: calls that came to their end.
        items: of these calls.
        packs: in which they were run.
        eager: of items that were planned to run eagerly, reason to count. A pack that the manager didn't replay for
            another reason, such as replaced weights, is among its manager's misses alone.
        towers: each adapter's manager's report, with its padding; under None where there is one adapter.
    """

    calls: int
    items: int
    packs: int
    eager: Mapping[str, int]
    towers: Mapping[Hashable, Report]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for `json.dumps`."""
        return {
            "calls": self.calls,
            "items": self.items,
            "packs": self.packs,
            "eager": dict(self.eager),
            "towers": {
                "" if name is None else str(name): report.to_dict() for name, report in self.towers.items()
            },
        }

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        eager = ", ".join(f"{count} {reason}" for reason, count in self.eager.items()) or "none"
        lines = [f"{self.calls} calls, {self.items} items in {self.packs} packs, items run eagerly: {eager}"]
        for name, report in self.towers.items():
            lines.append(str(report) if name is None else f"{name}\n{report}")
        return "\n".join(lines)


class CapturedEncoder:
    """An encoder function over captured graphs: `encoder(items)` gives one result for each item, in order.

    It can stand as the `fn` of an encoder of the embedder; with `takes_out`, too, where results are tensors of rows.

    Args:
        adapter: what knows the encoder; or several, by name, each with graphs of its own.
        buckets: the grid; where there are several adapters, a mapping of their names to grids, or one for all.
        path: with several adapters, a function that names an item's.
        cost: what packing saves: "measured", the seconds that a replay of each bucket took after its capture (the
            elements of its inputs, where one of the buckets isn't captured), or a function of the bucket.
        overhead: what each pack costs beside its replay, in the same unit: work of the host that the device waits for.
        **manager_options: of each adapter's `CaptureManager`.

    Raises:
        SpecError: an adapter that lacks something, no `path` for several or one where there is nothing to choose, no
            grid for one of them, or specs and options that the manager refuses.
        BucketError: a cost or an overhead that isn't a finite number of zero or more.

    Example:
        >>> import torch
        >>> from mmgraph.capture import BucketGrid, CapturedEncoder, rows
        >>> class Doubling:
        ...     inputs = {"x": rows("tokens")}
        ...     outputs = rows("tokens")
        ...     def sizes(self, item):
        ...         return {"tokens": len(item)}
        ...     def prepare(self, items, bucket):
        ...         return {"x": torch.cat(items)}
        ...     def forward(self, x):
        ...         return x * 2
        ...     def split(self, outputs, items):
        ...         return outputs.split([len(item) for item in items])
        >>> encoder = CapturedEncoder(Doubling(), buckets=BucketGrid(tokens=(4, 16)))
        >>> _ = encoder.precompile([torch.zeros(3)], progress=False)
        >>> encoder([torch.ones(2), torch.ones(1)])
        [tensor([2., 2.]), tensor([2.])]
    """

    #: State snapshots do not look inside: its managers' buffers are nobody's state.
    holds_captured_graphs = True

    def __init__(
        self,
        adapter: EncoderAdapter | Mapping[Hashable, EncoderAdapter],
        *,
        buckets: BucketGrid | Mapping[Hashable, BucketGrid],
        path: Callable[[Any], Hashable] | None = None,
        cost: Cost = "measured",
        overhead: float = 0.0,
        **manager_options: Any,
    ) -> None:
        adapters = dict(adapter) if isinstance(adapter, Mapping) else {None: adapter}
        if isinstance(adapter, Mapping):
            if not adapters or None in adapters:
                raise SpecError(f"adapters must be one, or a mapping of names to adapters, got {adapter!r}")
            if not callable(path):
                raise SpecError(
                    "with several adapters path= must be a function that names an item's, one of "
                    f"{list(adapters)}, got {path!r}"
                )
        elif path is not None:
            raise SpecError(
                "path= chooses among several adapters, and there is one: give a mapping of names to adapters, or give "
                "the adapter a method path(item)"
            )
        if cost != "measured" and not callable(cost):
            raise SpecError(f"cost must be 'measured' or a function of a bucket, got {cost!r}")
        grids = buckets if isinstance(buckets, Mapping) else dict.fromkeys(adapters, buckets)
        if grids.keys() != adapters.keys():
            raise SpecError(f"buckets must be a grid, or one for each of {list(adapters)}, got {list(grids)}")
        self._path = path
        self._towers = {
            name: Tower(name, each, grids[name], cost, overhead, manager_options)
            for name, each in adapters.items()
        }
        self._lock = threading.Lock()
        self._calls = self._items = self._packs = 0
        self._eager: Counter[str] = Counter()
        # Planning is nothing that could be traced into a compiled graph: torch.compile runs the call as it is.
        self._untraced = torch.compiler.disable(self._call)

    @property
    def managers(self) -> Mapping[Hashable, CaptureManager]:
        """Each adapter's manager, to suspend, invalidate or watch; under None where there is one adapter."""
        return {name: tower.manager for name, tower in self._towers.items()}

    def precompile(
        self,
        items: Sequence[Any],
        *,
        buckets: Sequence[Bucket] | Mapping[Hashable, Sequence[Bucket]] | None = None,
        progress: bool = True,
    ) -> CapturedEncoder:
        """Captures the buckets of every adapter and path that has items among the examples.

        Args:
            items: some items as calls have them, of any sizes: the example of each adapter and path is made from its
                items here. Those without any are not captured.
            buckets: only these of the grid's; or such by the names of adapters, where one that isn't named gets all.
            progress: show a progress bar.

        Returns:
            The encoder itself.

        Raises:
            CallError: no items, or an item of an unknown adapter.
            SpecError: buckets that aren't the grid's.
            AdapterError: sizes or inputs that don't fit.
            CaptureFailedError: as from `CaptureManager.precompile`.
        """
        items = _listed(items)
        if not items:
            raise CallError("precompile needs at least one item of each path as an example, got none")
        if isinstance(buckets, Mapping) and not buckets.keys() <= self._towers.keys():
            raise SpecError(
                f"buckets must be a sequence of the grid's, or such by the names of adapters {list(self._towers)}, got "
                f"{buckets!r}"
            )
        for (tower, path), positions in self._by_path(items).items():
            chosen = buckets.get(tower.name) if isinstance(buckets, Mapping) else buckets
            tower.precompile([items[i] for i in positions], positions, path, chosen, progress)
        return self

    def __call__(self, items: Sequence[Any], out: torch.Tensor | None = None) -> Any:
        """The results of the items.

        Args:
            items: any number of them.
            out: memory `[rows, width]` for the results, which must then be tensors `[item's rows, width]`.

        Returns:
            A list of one result for each item, in order; or `out`, where it is given. Results may be views of what
            their pack gave: to keep one for long, copy it.

        Raises:
            CallError: an item of an unknown adapter, or an `out` that the results don't fit; it is not written then.
            AdapterError: the adapter's sizes, inputs or results don't fit.
            MissError: an item that no graph serves, with `on_miss="error"`.
            CaptureError: whatever else the manager raises.
        """
        if torch.compiler.is_compiling():
            return self._untraced(items, out)
        return self._call(items, out)

    def explain(self, items: Sequence[Any]) -> tuple[EncoderPack, ...]:
        """The packs that a call with these items would run, with their buckets or why they run eagerly.

        Counts nothing.
        """
        return tuple(self._plan(list(items), closely=True))

    def report(self) -> EncoderReport:
        """Calls, items, packs and eager runs so far, and what the managers report."""
        towers = {name: tower.manager.report() for name, tower in self._towers.items()}
        with self._lock:
            return EncoderReport(self._calls, self._items, self._packs, dict(self._eager), towers)

    def close(self) -> None:
        """Drops every graph and buffer; later calls run eagerly."""
        for tower in self._towers.values():
            tower.manager.close()

    def __repr__(self) -> str:
        return f"CapturedEncoder({', '.join(map(repr, self.managers.values()))})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CaptureError(
            "a CapturedEncoder holds graphs of this process and can't be copied or pickled: make another one around "
            "the copied adapter, and keep it out of what is pickled"
        )

    def _call(self, items: Sequence[Any], out: torch.Tensor | None) -> Any:
        items = _listed(items)
        if out is not None:
            _check_out(out)
        packs = self._plan(items, closely=False)
        for pack in packs:  # before any is run
            self._towers[pack.tower].refuse_miss(pack)
        results: list[Any] = [None] * len(items)
        for pack in packs:
            given = self._towers[pack.tower].run(pack, [items[i] for i in pack.items])
            for position, result in zip(pack.items, given, strict=True):
                results[position] = result
        if out is not None:
            _write(results, out)
        with self._lock:
            self._calls += 1
            self._items += len(items)
            self._packs += len(packs)
            for pack in packs:
                if pack.bucket is None:
                    self._eager[pack.kind] += len(pack.items)
        return results if out is None else out

    def _plan(self, items: Sequence[Any], *, closely: bool) -> list[EncoderPack]:
        packs: list[EncoderPack] = []
        for (tower, path), positions in self._by_path(items).items():
            own = [items[i] for i in positions]
            packs += tower.plan(own, positions, path, closely=closely)
        return packs

    def _by_path(self, items: Sequence[Any]) -> dict[tuple[Tower, Hashable], list[int]]:
        """The positions of each tower's and path's items, in the order of the first of each."""
        found: dict[tuple[Tower, Hashable], list[int]] = {}
        for position, item in enumerate(items):
            name = None if self._path is None else self._path(item)
            hashable(name)
            tower = self._towers.get(name)
            if tower is None:
                raise CallError(
                    f"item {position} is of path {name!r}, for which there is no adapter: the paths are "
                    f"{list(self._towers)}"
                )
            found.setdefault((tower, tower.path(item)), []).append(position)
        return found


def _listed(items: Any) -> list[Any]:
    try:
        return list(items)
    except TypeError:
        raise CallError(f"items must be a sequence of what the adapter takes, got {items!r}") from None


def _check_out(out: Any) -> None:
    if not isinstance(out, torch.Tensor) or out.dim() != 2:
        came = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise CallError(f"out must be a tensor [rows, width], got {came}")
    if out.requires_grad:
        raise CallError("out needs a gradient, and a replay records none: detach it")
    if not (out.is_floating_point() or out.is_complex()):
        raise CallError(f"out must be floating-point, as rows are, got {out.dtype}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise CallError("out is an expanded tensor, whose elements share memory: give memory of its own")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise CallError(
            "out is an inference tensor: call within torch.inference_mode(), or give an ordinary one"
        )


def _write(results: Sequence[Any], out: torch.Tensor) -> None:
    """Copies the results into `out`, one after the other.

    Raises:
        CallError: they don't fit it.
    """
    for position, result in enumerate(results):
        if not isinstance(result, torch.Tensor) or result.dim() != 2:
            came = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise CallError(
                f"with out= each result must be a tensor [rows, width], got {came} for item {position}"
            )
        if result.device != out.device or result.shape[1] != out.shape[1]:
            raise CallError(
                f"out is [rows, {out.shape[1]}] on {out.device}, but the result of item {position} is "
                f"{list(result.shape)} on {result.device}"
            )
    total = sum(result.shape[0] for result in results)
    if total != out.shape[0]:
        raise CallError(f"out has {out.shape[0]} rows, but the results of the items have {total} together")
    if results:
        with torch.no_grad():
            torch._foreach_copy_(list(out.split([result.shape[0] for result in results])), list(results))
