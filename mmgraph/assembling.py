"""From a plan and the rows on its items to the language model's input embeddings.

Promises: the result equals looking up the text rows and then copying each range's rows, cast to the embedding's
dtype, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.errors import RowsError
from mmgraph.items import MultimodalDataItem
from mmgraph.modality import Modality
from mmgraph.ops import RowMap, assemble_embeddings
from mmgraph.planning import EncodePlan
from mmgraph.rows import check_rows
from mmgraph.staging import FeatureMover
from mmgraph.text_rows import TextRows


@dataclass(frozen=True, slots=True)
class DeepstackRows:
    """Deepstack rows in sparse form, the arguments of ``mmgraph.ops.deepstack_add(hidden, pool, row_map,
    level)``.

    Attributes:
        pool: ``[rows, levels * hidden]``, in the encoder's dtype.
        row_map: int32 ``[tokens]``: the pool's row for each row of the batch, -1 for none.
        levels: How many levels a pool row holds.
    """

    pool: torch.Tensor
    row_map: torch.Tensor
    levels: int


def assemble(
    plan: EncodePlan,
    text: TextRows,
    specs: Mapping[Modality, EncoderSpec],
    model: Any,
    mover: FeatureMover,
    *,
    checked: bool = False,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Put text rows and items' rows together.

    Args:
        plan: A plan that has ranges and whose items are all encoded.
        text: The look-up of the text rows.
        specs: The encoders; they say which modalities have deepstack rows, and in which form.
        model: Says how many levels deepstack has.
        mover: Brings rows that are kept on another device.
        checked: The items' rows were checked against the embedding's width already.

    Returns:
        Embeddings ``[T, hidden]``, and the keywords for the language model: ``input_deepstack_embeds`` ``[T,
        hidden * levels]`` or ``deepstack_rows`` where a range has a modality with deepstack, else none.

    Raises:
        RowsError: An item isn't encoded, or its rows don't fit it or the embedding.
        LookupInputError: The embedding doesn't give one row for each id.
    """
    deep_modalities = {modality for modality, spec in specs.items() if spec.deepstack}
    is_deep = np.array(
        [entry.item.modality in deep_modalities for entry in plan.scatter_ranges], dtype=np.bool_
    )
    levels = deepstack_levels(model) if is_deep.any() else 0
    ids, table = text.source(plan)
    for item in () if checked else plan.items:
        try:
            check_rows(item, table.shape[-1], levels if item.modality in deep_modalities else 0)
        except RowsError as error:
            request = plan.request_of(item)
            raise RowsError(f"request {request}: {error}", request=request) from error
    used, row_map = _layout(plan, np.ones_like(is_deep), ids)
    pool = _gathered(used, "encoded", ids.device, mover)
    embeds = assemble_embeddings(ids, table, pool, row_map, strict=text.strict and text.table is not None)
    if not levels:
        return embeds, {}
    used, deep_map = (used, row_map) if is_deep.all() else _layout(plan, is_deep, ids)
    deep_pool = _gathered(used, "encoded_deepstack", ids.device, mover)
    if any(spec.deepstack and spec.deepstack_form == "sparse" for spec in specs.values()):
        return embeds, {"deepstack_rows": DeepstackRows(deep_pool, deep_map, levels)}
    zeros = embeds.new_zeros(1, deep_pool.shape[1])
    dense = assemble_embeddings(torch.zeros_like(ids), zeros, deep_pool, deep_map)
    return embeds, {"input_deepstack_embeds": dense}


def _layout(
    plan: EncodePlan, chosen: npt.NDArray[np.bool_], ids: torch.Tensor
) -> tuple[dict[MultimodalDataItem, tuple[int, int]], torch.Tensor]:
    """Choose the rows of a pool for some ranges.

    Returns:
        For each item of the chosen ranges, in the pool's order, the first and the last of its rows that they
        touch; and the map of the batch's rows to the pool's.
    """
    used: dict[MultimodalDataItem, tuple[int, int]] = {}
    ranges = [entry for entry, take in zip(plan.scatter_ranges, chosen, strict=True) if take]
    for entry in ranges:
        low, high = used.get(entry.item, (entry.item_src_start, entry.item_src_end))
        used[entry.item] = min(low, entry.item_src_start), max(high, entry.item_src_end)
    places: dict[MultimodalDataItem, int] = {}
    pool_rows = 0
    for item, (low, high) in used.items():
        places[item] = pool_rows - low
        pool_rows += high - low + 1
    sources = plan.src_start[chosen] + np.array([places[entry.item] for entry in ranges], dtype=np.int64)
    row_map = RowMap.from_ranges(
        ids.shape[0], plan.dst_start[chosen], plan.dst_end[chosen], sources, pool_rows=pool_rows
    )
    return used, row_map.to(ids.device)


def _gathered(
    used: Mapping[MultimodalDataItem, tuple[int, int]], name: str, device: torch.device, mover: FeatureMover
) -> torch.Tensor:
    """Join the items' rows that are used into one pool."""
    parts: list[torch.Tensor] = []
    for item, (low, high) in used.items():
        rows = getattr(item, name)
        parts.append(rows if high - low + 1 == rows.shape[0] else rows[low : high + 1])
    moved = mover.move(parts, device)
    return moved[0] if len(moved) == 1 else torch.cat(moved)
