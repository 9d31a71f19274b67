"""``assert_plan_correct``: does a planner find the same ranges, canonical items, aliases and misses as the oracle?"""

from collections.abc import Callable
from typing import Any

from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext
from mmgraph.testing import reference
from mmgraph.testing.batch_strategies import batches
from mmgraph.testing.batches import BatchCase
from mmgraph.testing.searching import Failure, find_failure


class PlanMismatch(AssertionError):
    """A planner's plan isn't the oracle's.

    Args:
        message: What differs, and the smallest case found.
        case: That case.
    """

    def __init__(self, message: str, *, case: Any = None) -> None:
        super().__init__(message)
        self.case = case


def assert_plan_correct(
    fn: Callable[[MultimodalForwardContext, int], Any], *, examples: int = 200, derandomize: bool = True
) -> None:
    """Check a planner on many small batches.

    Args:
        fn: Of a context and the number of rows of ``input_ids``, as `mmgraph.build_plan`. Gives something with
            ``scatter_ranges``, ``range_requests``, ``misses_by_modality`` and ``aliases_by_canonical`` as in
            `mmgraph.EncodePlan`.
        examples: How many batches to try.
        derandomize: Try the same ones every time; else new ones.

    Raises:
        PlanMismatch: A plan differs; the message has the smallest batch found, and ``case`` holds it.
        OptionError: ``examples`` isn't a positive integer.
    """
    failure = find_failure(
        batches(), lambda case: _failure(fn, case), examples=examples, derandomize=derandomize
    )
    if failure is not None:
        raise PlanMismatch(
            f"The plan is wrong. {failure.words}{failure.notes()}\n\nThe smallest case found:\n\n"
            "import torch\nfrom mmgraph.testing import BatchCase, Chunk, ItemCase, RequestCase\n\n"
            f"case = {failure.case!r}\nbatch = case.build()\nplan = fn(batch.ctx, batch.input_ids.shape[0])",
            case=failure.case,
        ) from failure.cause


def _failure(fn: Callable[[MultimodalForwardContext, int], Any], case: BatchCase) -> Failure | None:
    batch = case.build()
    expected = reference.plan(batch.ctx)
    names = {
        item: f"item {place} of request {request}"
        for request, inputs in reversed(list(enumerate(batch.ctx.mm_inputs or ())))
        for place, item in enumerate(inputs.mm_items if inputs is not None else ())
        if item is not None
    }
    try:
        plan = fn(batch.ctx, batch.input_ids.shape[0])
        came: dict[str, Any] = {
            "ranges": [tuple(entry) for entry in plan.scatter_ranges],
            "requests of ranges": list(plan.range_requests),
            "aliases": {item: list(twins) for item, twins in plan.aliases_by_canonical.items()},
            "misses": [(modality, list(items)) for modality, items in plan.misses_by_modality.items()],
        }
    except Exception as error:
        return Failure(case, f"It raised {type(error).__name__}: {error}", cause=error)
    right: dict[str, Any] = {
        "ranges": [(r.dst_start, r.dst_end, r.item, r.src_start, r.src_end) for r in expected.ranges],
        "requests of ranges": [entry.request for entry in expected.ranges],
        "aliases": expected.aliases,
        "misses": list(expected.misses.items()),
    }
    for part, value in right.items():
        if came[part] != value:
            return Failure(case, f"Its {part} are {_named(came[part], names)}, not {_named(value, names)}.")
    return None


def _named(value: Any, names: dict[MultimodalDataItem, str]) -> str:
    """Write a value with each item by its place in the batch."""
    if isinstance(value, MultimodalDataItem):
        return names.get(value, "an item that isn't in the batch")
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_named(k, names)}: {_named(v, names)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(_named(entry, names) for entry in value)}{right}"
    return str(value)
