"""Whose fault is it? Failures traced to the requests of a batch, which can then be set aside.

Promises: the walk over the batch is the plan's own: prefill chunks in order, then one row for each request that
decodes. What is read here is read for errors only, so it may take its time.
"""

from collections.abc import Collection, Iterator

import torch

from mmgraph.errors import LookupInputError, MultimodalError
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.planning import EncodePlan, build_plan
from mmgraph.text_rows import TextRows


def plan_without_failures(
    ctx: MultimodalForwardContext, num_tokens: int, failed: dict[int, MultimodalError] | None
) -> EncodePlan:
    """Plan; where failures are to be set aside, plan again without each request that is to blame.

    Args:
        ctx: The batch.
        num_tokens: Rows of ``input_ids``.
        failed: Gets the errors, by request; None: nothing is set aside.

    Returns:
        The plan.

    Raises:
        MultimodalError: Without ``failed`` the first error; with it, one that is no single request's.
    """
    while True:
        try:
            return build_plan(ctx, num_tokens, skip=failed or ())
        except MultimodalError as error:
            if failed is None or error.request is None or error.request in failed:
                raise
            failed[error.request] = error


def outside_errors(
    text: TextRows, plan: EncodePlan, ctx: MultimodalForwardContext | None
) -> list[LookupInputError]:
    """Name the text ids outside the vocabulary, where that is an error that the host can see.

    Args:
        text: The look-up.
        plan: Says which rows are covered.
        ctx: Says whose row is whose; None: nothing does.

    Returns:
        One error for each request that has such ids, with the first of them.
    """
    errors: dict[int | None, LookupInputError] = {}
    rows = text.outside(plan).tolist()
    if not rows:
        return []
    owners = _owners(ctx, text.input_ids.shape[0])
    for row in rows:
        request, position = (None, None) if owners is None else owners[row]
        if request in errors:
            continue
        whose = "" if request is None else f"request {request}: "
        place = "" if position is None else f", position {position} of its prompt,"
        errors[request] = LookupInputError(
            f"{whose}id {int(text.input_ids[row])} in row {row} of input_ids{place} is outside the vocabulary of "
            f"{text.vocabulary} and no item covers it; correct the id or the offsets, or leave strict off to look up "
            "the nearest row",
            request=request,
        )
    return list(errors.values())


def blanked(input_ids: torch.Tensor, ctx: MultimodalForwardContext, requests: Collection[int]) -> torch.Tensor:
    """Blank the ids of requests: their placeholders are uncovered now, and may be beyond the vocabulary.

    Args:
        input_ids: The batch's ids.
        ctx: The batch.
        requests: Whose rows.

    Returns:
        A copy with zeros in those rows; ``input_ids`` itself where there are none.
    """
    if not requests:
        return input_ids
    out = input_ids.clone()
    for request, start, end, _ in _chunks(ctx, input_ids.shape[0]):
        if request in requests:
            out[start:end] = 0
    return out


def _owners(ctx: MultimodalForwardContext | None, total: int) -> list[tuple[int, int | None]] | None:
    if ctx is None:
        return None
    return [
        (request, None if first is None else first + step)
        for request, start, end, first in _chunks(ctx, total)
        for step in range(end - start)
    ]


def _chunks(ctx: MultimodalForwardContext, total: int) -> Iterator[tuple[int, int, int, int | None]]:
    """Give request, rows from and to, and the first row's prompt position, which only prefill requests tell."""
    lengths = [] if ctx.extend_seq_lens is None else list(ctx.extend_seq_lens)
    prefixes = [] if ctx.extend_prefix_lens is None else list(ctx.extend_prefix_lens)
    base = 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        rows = max(int(length), 0)
        yield request, base, base + rows, int(prefix)
        base += rows
    for step, row in enumerate(range(base, total)):
        yield len(lengths) + step, row, row + 1, None
