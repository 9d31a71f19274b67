"""From a plan and the rows on its items to the language model's input embeddings.

Promises: text ids are clamped into the vocabulary for the look-up only, and rows that an item covers are never
looked up; an embedding that does more than look up is called as the module it is; the result equals looking up
the text rows and then copying each range's rows, cast to the embedding's dtype, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as _module_globals

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.errors import LookupInputError, RowsError
from mmgraph.items import MultimodalDataItem
from mmgraph.modality import Modality
from mmgraph.ops import RowMap, assemble_embeddings
from mmgraph.planning import EncodePlan
from mmgraph.rows import check_rows
from mmgraph.staging import FeatureMover, upload

TextEmbedding = torch.nn.Module | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


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


def check_input_ids(input_ids: Any) -> None:
    """Check that ids are flat integers.

    Raises:
        LookupInputError: They aren't.
    """
    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.dim() != 1
        or input_ids.dtype not in (torch.int32, torch.int64)
    ):
        came = (
            f"{input_ids.dtype} {list(input_ids.shape)}"
            if isinstance(input_ids, torch.Tensor)
            else type(input_ids)
        )
        raise LookupInputError(
            f"input_ids must be an int32 or int64 tensor of one dimension, got {came}; flatten the batch's rows"
        )


def plain_table(embedding: TextEmbedding) -> torch.Tensor | None:
    """Give the table of an embedding that only looks up, or None for one that has to be called.

    A look-up is more than that where forward is overridden or hooked, weights are parametrized, quantised or
    distributed, looked-up rows are renormalised, or the gradient is not the plain one.
    """
    if isinstance(embedding, torch.Tensor):
        return embedding
    if type(embedding) is not torch.nn.Embedding:
        return None
    weight = embedding.weight
    hooks = (
        embedding._forward_hooks,
        embedding._forward_pre_hooks,
        embedding._backward_hooks,
        embedding._backward_pre_hooks,
        _module_globals._global_forward_hooks,
        _module_globals._global_forward_pre_hooks,
        _module_globals._global_backward_hooks,
        _module_globals._global_backward_pre_hooks,
    )
    if any(hooks) or "forward" in vars(embedding) or embedding.max_norm is not None:
        return None
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or not weight.is_floating_point():
        return None
    special_gradient = embedding.padding_idx is not None or embedding.scale_grad_by_freq or embedding.sparse
    if special_gradient and weight.requires_grad and torch.is_grad_enabled():
        return None
    return weight


class TextRows:
    """The look-up of the rows that no item covers.

    Args:
        input_ids: int32 or int64 ``[T]``.
        embedding: The text embedding.
        strict: Ids outside the vocabulary at uncovered rows are errors.
    """

    def __init__(self, input_ids: torch.Tensor, embedding: TextEmbedding, *, strict: bool) -> None:
        self.input_ids = input_ids
        self.embedding = embedding
        self.strict = strict
        self.table = plain_table(embedding)
        self._called: tuple[EncodePlan, torch.Tensor, npt.NDArray[np.int32]] | None = None

    def width(self, plan: EncodePlan) -> int:
        """Give the embedding's width; calls the embedding where only its output tells.

        Raises:
            LookupInputError: The embedding doesn't give one row for each id.
        """
        rows = self._rows_of(plan)[0] if self.table is None else self.table
        return rows.shape[-1]

    def source(self, plan: EncodePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Give ids and a table whose look-up gives the text rows.

        Returns:
            The ids as they came and the embedding's table; or, for an embedding that was called, each row's
            place among the rows that the call gave, and those rows.

        Raises:
            LookupInputError: The embedding doesn't give one row for each id.
        """
        if self.table is not None:
            return self.input_ids, self.table
        rows, places = self._rows_of(plan)
        return upload(places, rows.device), rows

    def _rows_of(self, plan: EncodePlan) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        if self._called is None or self._called[0] is not plan:
            total = self.input_ids.shape[0]
            change = np.zeros(total + 1, dtype=np.int32)  # a plan's ranges are disjoint, so no index repeats
            change[plan.dst_start] += 1
            change[plan.dst_end + 1] -= 1
            is_text = np.cumsum(change[:total]) == 0
            ids = self.input_ids[upload(np.flatnonzero(is_text), self.input_ids.device)]
            rows = self._call(ids)
            self._called = plan, rows, np.cumsum(is_text, dtype=np.int32) - is_text
        return self._called[1], self._called[2]

    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        if not callable(self.embedding):
            raise LookupInputError(
                f"the text embedding must be a module, a table or a function, got {type(self.embedding).__name__}"
            )
        size = _vocabulary(self.embedding)
        if self.strict and size is not None:
            # The op's own check, on a table without width: it records on a device and raises on a CPU.
            empty = torch.zeros(size, 1, device=ids.device)
            assemble_embeddings(ids, empty, empty[:0], torch.full_like(ids, -1, dtype=torch.int32), strict=True)
        rows = self.embedding(ids.clamp(min=0) if size is None else ids.clamp(0, max(size - 1, 0)))
        if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape[0] != ids.shape[0]:
            came = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise LookupInputError(
                f"the text embedding must give [{ids.shape[0]}, width] for {ids.shape[0]} ids, got {came}"
            )
        return rows


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
    pool, row_map = _gather(plan, np.ones_like(is_deep), "encoded", ids, mover)
    embeds = assemble_embeddings(ids, table, pool, row_map, strict=text.strict and text.table is not None)
    if not levels:
        return embeds, {}
    deep_pool, deep_map = _gather(plan, is_deep, "encoded_deepstack", ids, mover)
    if is_deep.all() and deep_pool.shape[0] == pool.shape[0]:
        deep_map = row_map
    if any(spec.deepstack and spec.deepstack_form == "sparse" for spec in specs.values()):
        return embeds, {"deepstack_rows": DeepstackRows(deep_pool, deep_map, levels)}
    zeros = embeds.new_zeros(1, deep_pool.shape[1])
    dense = assemble_embeddings(torch.zeros_like(ids), zeros, deep_pool, deep_map)
    return embeds, {"input_deepstack_embeds": dense}


def _gather(
    plan: EncodePlan, chosen: npt.NDArray[np.bool_], name: str, ids: torch.Tensor, mover: FeatureMover
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the rows that the chosen ranges touch into one pool, and map the batch's rows to it."""
    used: dict[MultimodalDataItem, tuple[int, int]] = {}
    ranges = [entry for entry, take in zip(plan.scatter_ranges, chosen, strict=True) if take]
    for entry in ranges:
        low, high = used.get(entry.item, (entry.item_src_start, entry.item_src_end))
        used[entry.item] = min(low, entry.item_src_start), max(high, entry.item_src_end)
    parts: list[torch.Tensor] = []
    places: dict[MultimodalDataItem, int] = {}
    pool_rows = 0
    for item, (low, high) in used.items():
        rows = getattr(item, name)
        parts.append(rows if high - low + 1 == rows.shape[0] else rows[low : high + 1])
        places[item] = pool_rows - low
        pool_rows += high - low + 1
    pool = _joined(mover.move(parts, ids.device))
    sources = plan.src_start[chosen] + np.array([places[entry.item] for entry in ranges], dtype=np.int64)
    row_map = RowMap.from_ranges(
        ids.shape[0], plan.dst_start[chosen], plan.dst_end[chosen], sources, pool_rows=pool_rows
    )
    return pool, row_map.to(ids.device)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _vocabulary(embedding: Any) -> int | None:
    size = getattr(embedding, "num_embeddings", None)
    if isinstance(size, int):
        return size
    weight = getattr(embedding, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
