"""Hypothesis strategies for prompts with media and for forward batches of them.

Promises: what they draw is valid; every corner that chunking, sharing and decoding have turns up within a few hundred
examples: spans cut before, in and after; chunks of no rows; twins in one request and in two; one hash in two
modalities; several spans of one item; one request's media in another; rows that come precomputed; entries that are
None. The argument ``draw`` is hypothesis's own, not the caller's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.modality import Modality
from mmgraph.testing.batches import BatchCase, Chunk, ItemCase, RequestCase
from mmgraph.testing.chunking import chunks
from mmgraph.testing.drawing import FLOATING, picks, seeds, seldom_least, token_ids
from mmgraph.testing.options import bounded, check_dtypes

_MODALITIES = tuple(modality.value for modality in Modality)

# Drawn once for a batch: that its items are of one size or one modality makes twins likely.
_SPANS = picks(None, 1, 2)
_NAMES = picks(_MODALITIES, _MODALITIES[:1])


def _check_modalities(options: dict[str, Any]) -> None:
    names = options["modalities"]
    listed = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else []
    if not listed or not all(name in _MODALITIES for name in listed):
        raise OptionError(f"modalities must be a list of names out of {list(_MODALITIES)}, got {names!r}")


@bounded({"prompt": 0, "max_spans": 0, "max_span": 1, "span": 1}, _check_modalities)
@st.composite
def items(
    draw: st.DrawFn,
    prompt: int,
    *,
    max_spans: int = 4,
    max_span: int = 4,
    span: int | None = None,
    modalities: Sequence[str] = _MODALITIES,
    precomputed: bool = True,
) -> tuple[ItemCase | None, ...]:
    """Draw the media of one prompt: disjoint spans, dealt out to items in any order.

    An item has one or several spans, or none. Some items have a hash, of two contents for each size, so that twins
    and one hash in two modalities are frequent. Some entries are None.

    Args:
        prompt: The prompt's positions.
        max_spans: The most spans of the prompt.
        max_span: The most positions of a span.
        span: The positions of every span that isn't cut off by the prompt's end. Spans are then dealt out in turn, so
            that items are of one size and twins are likely, in other prompts too. None: each is drawn.
        modalities: The names to draw from.
        precomputed: Some items come with rows, with or without a feature.
    """
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(draw(seldom_least(0, 3)))]
    first = 0
    for turn in range(draw(seldom_least(0, max_spans)) if dealt else 0):
        start = first + draw(st.integers(0, 2))
        if start >= prompt:
            break
        length = draw(seldom_least(1, max_span)) if span is None else span
        end = min(start + length, prompt) - 1
        owner = draw(st.integers(0, len(dealt) - 1)) if span is None else turn % len(dealt)
        dealt[owner].append((start, end))
        first = end + 1
    found: list[ItemCase | None] = [draw(_item(tuple(spans), modalities, precomputed)) for spans in dealt]
    if draw(st.booleans()):
        found.insert(draw(st.integers(0, len(found))), None)
    return tuple(found)


@bounded({"prompt": 0}, check_dtypes)
@st.composite
def prompts(
    draw: st.DrawFn, prompt: int, *, precomputed: bool = False, dtypes: Sequence[torch.dtype] = FLOATING
) -> BatchCase:
    """Draw a batch of one whole prompt with media, to be cut into chunks.

    Args:
        prompt: Its positions.
        precomputed: Items may come with rows. A twin's rows that differ make the cut matter, so then no item has
            a hash.
        dtypes: Of tables and encoders.
    """
    media = draw(items(prompt, span=draw(_SPANS), modalities=draw(_NAMES), precomputed=precomputed))
    if precomputed:
        media = tuple(
            item and ItemCase(item.modality, item.spans, None, item.precomputed, item.has_feature)
            for item in media
        )
    return draw(_dressed((RequestCase(media, Chunk(0, prompt)),), prompt, dtypes))


@bounded({"max_requests": 0, "max_prompt": 1, "max_decodes": 0}, check_dtypes)
@st.composite
def batches(
    draw: st.DrawFn,
    *,
    max_requests: int = 4,
    max_prompt: int = 12,
    max_decodes: int = 2,
    precomputed: bool = True,
    dtypes: Sequence[torch.dtype] = FLOATING,
) -> BatchCase:
    """Draw forward batches.

    Args:
        max_requests: The most prefill requests; there may be none.
        max_prompt: The most positions of a prompt.
        max_decodes: The most requests that decode; they may have media, which the batch doesn't touch.
        precomputed: Some items come with rows.
        dtypes: Of tables and encoders.
    """
    span, names = draw(_SPANS), draw(_NAMES)

    def media_of(prompt: int) -> tuple[ItemCase | None, ...] | None:
        if not draw(picks(False, *[True] * 6)):
            return None
        return draw(items(prompt, span=span, modalities=names, precomputed=precomputed))

    requests: list[RequestCase] = []
    prompt_of: list[int] = []
    rows = 0
    for _ in range(draw(seldom_least(0, max_requests))):
        same_as = draw(picks(None, None, None, *range(len(requests))))
        prompt = draw(seldom_least(1, max_prompt)) if same_as is None else prompt_of[same_as]
        media = media_of(prompt) if same_as is None else None
        chunk = draw(chunks(prompt))
        requests.append(RequestCase(media, chunk, same_as))
        prompt_of.append(prompt)
        rows += max(chunk.length, 0)
    for _ in range(draw(st.integers(0, max_decodes))):
        requests.append(RequestCase(media_of(max_prompt), None))
        rows += 1
    return draw(_dressed(tuple(requests), rows, dtypes))


@st.composite
def _item(
    draw: st.DrawFn, spans: tuple[tuple[int, int], ...], modalities: Sequence[str], precomputed: bool
) -> ItemCase:
    tokens = sum(end - start + 1 for start, end in spans)
    contents = draw(picks(None, 0, 0, 0, 1))
    has_rows = bool(spans) and precomputed and draw(picks(False, False, False, True))
    return ItemCase(
        modality=draw(picks(*modalities)),
        spans=spans,
        hash=None if contents is None else 2 * tokens + contents,
        precomputed=has_rows,
        has_feature=not has_rows or draw(st.booleans()),
    )


@st.composite
def _dressed(
    draw: st.DrawFn, requests: tuple[RequestCase, ...], rows: int, dtypes: Sequence[torch.dtype]
) -> BatchCase:
    vocabulary = draw(st.integers(1, 9))
    id_dtype = draw(picks(torch.int64, torch.int32))
    deepstack = tuple(name for name in _MODALITIES if draw(st.booleans()))
    return BatchCase(
        requests=requests,
        ids=draw(token_ids(rows, vocabulary, id_dtype=id_dtype)),
        vocabulary=vocabulary,
        width=draw(st.integers(1, 3)),
        dtype=draw(picks(*dtypes)),
        row_dtypes=tuple(draw(picks(*dtypes)) for _ in Modality),
        deepstack=deepstack,
        levels=draw(st.integers(1, 2)) if deepstack else 0,
        id_dtype=id_dtype,
        seed=draw(seeds()),
    )
