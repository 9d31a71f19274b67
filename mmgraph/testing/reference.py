"""The oracle: what plan, assembly and gradients must be, worked out row by row in plain Python.

Promises: no code of the planner, the embedder or the ops is used, and no numpy; values are copied and cast a row at a
time by PyTorch, so they are what "bit for bit" means. Slow on purpose: for prompts of tens of positions.
"""

from collections.abc import Mapping, Sequence

import torch

from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext
from mmgraph.testing.origins import Origin, SourceRange, map_origins, mask_origins, range_origins
from mmgraph.testing.planned import ExpectedPlan, ExpectedRange, plan

__all__ = [
    "ExpectedPlan",
    "ExpectedRange",
    "assemble",
    "assemble_gradients",
    "assemble_map",
    "deepstack_add",
    "deepstack_dense",
    "embed",
    "embed_deepstack",
    "merge",
    "merge_gradients",
    "plan",
]


def assemble(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    sources: Sequence[torch.Tensor],
    ranges: Sequence[SourceRange],
) -> torch.Tensor:
    """Look up the text rows, then copy each range's rows over them, in order, cast to the table's dtype.

    Args:
        input_ids: Integers ``[T]``; ids outside the vocabulary take its nearest row.
        table: ``[V, H]``.
        sources: ``[n_i, H]`` each.
        ranges: Where their rows go.

    Returns:
        ``[T, H]`` in the table's dtype.
    """
    origins = range_origins(input_ids.tolist(), table.shape[0], ranges)
    return _taken(origins, {"text": [table], "source": sources}, table)


def assemble_map(
    input_ids: torch.Tensor, table: torch.Tensor, pool: torch.Tensor, row_map: Sequence[int]
) -> torch.Tensor:
    """Row i is ``pool[row_map[i]]``, or the table's row of ``input_ids[i]`` where that is -1.

    Args:
        input_ids: Integers ``[T]``.
        table: ``[V, H]``.
        pool: ``[R, H]``.
        row_map: T integers.

    Returns:
        ``[T, H]`` in the table's dtype.
    """
    origins = map_origins(input_ids.tolist(), table.shape[0], row_map)
    return _taken(origins, {"text": [table], "pool": [pool]}, table)


def merge(embeds: torch.Tensor, mask: Sequence[bool], features: torch.Tensor) -> torch.Tensor:
    """Replace the masked rows by the feature rows, in order.

    Args:
        embeds: ``[T, H]``.
        mask: T booleans, as many of them true as there are features.
        features: ``[n, H]``.

    Returns:
        ``[T, H]`` in the dtype of ``embeds``.
    """
    return _taken(mask_origins(mask), {"embeds": [embeds], "features": [features]}, embeds)


def deepstack_dense(pool: torch.Tensor, row_map: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Spread deepstack rows over the batch: zeros where the map is -1.

    Args:
        pool: ``[R, levels * H]``.
        row_map: T integers.
        dtype: The hidden states'.

    Returns:
        ``[T, levels * H]``.
    """
    dense = torch.zeros(len(row_map), pool.shape[1], dtype=dtype, device=pool.device)
    for row, place in enumerate(row_map):
        if place >= 0:
            dense[row] = pool[place].to(dtype)
    return dense


def deepstack_add(hidden: torch.Tensor, pool: torch.Tensor, row_map: Sequence[int], level: int) -> torch.Tensor:
    """Add one level's part of the dense buffer.

    Args:
        hidden: ``[T, H]``.
        pool: ``[R, levels * H]``.
        row_map: T integers.
        level: From 0.

    Returns:
        ``[T, H]`` in the dtype of ``hidden``.
    """
    width = hidden.shape[1]
    return hidden + deepstack_dense(pool, row_map, hidden.dtype)[:, level * width : (level + 1) * width]


def assemble_gradients(
    gradient: torch.Tensor,
    input_ids: torch.Tensor,
    table: torch.Tensor,
    sources: Sequence[torch.Tensor],
    ranges: Sequence[SourceRange],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Give the gradients of `assemble`: the table's from text rows alone, a source row's as often as it is used.

    Args:
        gradient: Of the result, ``[T, H]``.
        input_ids: As for `assemble`.
        table: As for `assemble`.
        sources: As for `assemble`.
        ranges: As for `assemble`.

    Returns:
        Of the table and of each source, float64.
    """
    origins = range_origins(input_ids.tolist(), table.shape[0], ranges)
    sums = added_gradients(origins, gradient, {"text": [table], "source": sources})
    return sums["text"][0], sums["source"]


def merge_gradients(
    gradient: torch.Tensor, embeds: torch.Tensor, mask: Sequence[bool], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the gradients of `merge`.

    Args:
        gradient: Of the result, ``[T, H]``.
        embeds: As for `merge`.
        mask: As for `merge`.
        features: As for `merge`.

    Returns:
        Of ``embeds`` and of ``features``, float64.
    """
    sums = added_gradients(mask_origins(mask), gradient, {"embeds": [embeds], "features": [features]})
    return sums["embeds"][0], sums["features"][0]


def embed(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    ctx: MultimodalForwardContext,
    rows: Mapping[MultimodalDataItem, torch.Tensor],
) -> torch.Tensor:
    """Give the embeddings of a batch.

    Args:
        input_ids: Integers ``[T]``.
        table: ``[V, H]``.
        ctx: The batch, before it is embedded.
        rows: What each item has or is encoded to, ``[tokens, H]`` or wider; the first H columns count.

    Returns:
        ``[T, H]`` in the table's dtype.
    """
    expected = plan(ctx)
    sources = [rows[item][:, : table.shape[1]] for item in expected.canonicals]
    places = {item: place for place, item in enumerate(expected.canonicals)}
    return assemble(
        input_ids,
        table,
        sources,
        [SourceRange(r.dst_start, r.dst_end, places[r.item], r.src_start) for r in expected.ranges],
    )


def embed_deepstack(
    num_tokens: int,
    ctx: MultimodalForwardContext,
    deep_rows: Mapping[MultimodalDataItem, torch.Tensor],
    *,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Give the dense deepstack rows of a batch.

    Args:
        num_tokens: Rows of ``input_ids``.
        ctx: The batch, before it is embedded.
        deep_rows: ``[tokens, width]`` of each item whose modality has deepstack; the others' rows stay zero.
        width: Levels times the hidden width.
        dtype: The table's.

    Returns:
        ``[num_tokens, width]``.
    """
    dense = torch.zeros(num_tokens, width, dtype=dtype)
    for entry in plan(ctx).ranges:
        if entry.item in deep_rows:
            for row in range(entry.dst_start, entry.dst_end + 1):
                dense[row] = deep_rows[entry.item][entry.src_start + row - entry.dst_start].to(dtype)
    return dense


def _taken(
    origins: Sequence[Origin], inputs: Mapping[str, Sequence[torch.Tensor]], like: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(len(origins), like.shape[1], dtype=like.dtype, device=like.device)
    for row, origin in enumerate(origins):
        out[row] = inputs[origin.kind][origin.source][origin.row].detach().to(like.dtype)
    return out


def added_gradients(
    origins: Sequence[Origin], gradient: torch.Tensor, inputs: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, list[torch.Tensor]]:
    """Add the gradient of each output row to the row that it came from, float64, by the kind of `Origin`."""
    sums = {
        kind: [torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device) for tensor in tensors]
        for kind, tensors in inputs.items()
    }
    for row, origin in enumerate(origins):
        sums[origin.kind][origin.source][origin.row] += gradient[row].double()
    return sums
