"""From a plan and the rows that are kept to the language model's input embeddings.

Promises: the result equals looking up the text rows and then copying each range's rows, cast to the embedding's
dtype, bit for bit. Rows are read where they lie; only deepstack rows that lie on items are joined, for the sparse form.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmgraph.encoder_spec import EncoderSpec, deepstack_levels
from mmgraph.keeping import Keeper, levels_by_modality
from mmgraph.layouts import Layout, Wanted
from mmgraph.modality import Modality
from mmgraph.ops import RowMap, assemble_embeddings
from mmgraph.planning import EncodePlan
from mmgraph.staging import FeatureMover
from mmgraph.text_rows import TextRows


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class DeepstackRows:
    """Deepstack rows in sparse form, the arguments of ``mmgraph.ops.deepstack_add(hidden, pool, row_map,
    level)``.

    Attributes:
        pool: ``[rows, levels * hidden]``, in the encoder's or the pool's dtype. Columns of an `EncoderPool` where there
            is one: not to be written to.
        row_map: int32 ``[tokens]``: the pool's row for each row of the batch, -1 for none.
        levels: How many levels a pool row holds.
        release: Ends the hold on the rows in an `EncoderPool`; call it once what reads them is launched. A record that
            is lost ends it too, a little later.
    """

    pool: torch.Tensor
    row_map: torch.Tensor
    levels: int
    release: Callable[[], None] = field(default=_nothing, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class BatchLayouts:
    """Where a batch's rows lie.

    Attributes:
        main: The main rows, of all ranges.
        deep: The deepstack rows, of the ranges whose modality has any; None where there is none.
        levels: Deepstack levels; 0 where there is none.
    """

    main: Layout
    deep: Layout | None
    levels: int


def lay_out(
    plan: EncodePlan,
    num_rows: int,
    width: int,
    specs: Mapping[Modality, EncoderSpec],
    model: Any,
    keeper: Keeper,
    device: torch.device,
    mover: FeatureMover,
) -> BatchLayouts:
    """Say where the rows of a plan lie.

    Args:
        plan: A plan that has ranges and whose items' rows are all there.
        num_rows: Rows of the batch.
        width: The text embedding's width.
        specs: The encoders; they say which modalities have deepstack rows.
        model: Says how many levels deepstack has.
        keeper: Has the rows.
        device: Where they must be.
        mover: Brings rows that are elsewhere.
    """
    deep_modalities = {modality for modality, spec in specs.items() if spec.deepstack}
    is_deep = np.zeros(len(plan.range_items), dtype=np.bool_)
    if deep_modalities:
        is_deep[:] = [item.modality in deep_modalities for item in plan.range_items]
    everything = np.ones_like(is_deep)
    main = keeper.layout(Wanted(plan, everything, num_rows, (0, width), device, mover))
    if not is_deep.any():
        return BatchLayouts(main, None, 0)
    levels = deepstack_levels(model)
    columns = width, width * (1 + levels)
    known = main if is_deep.all() else None
    deep = keeper.layout(Wanted(plan, is_deep, num_rows, columns, device, mover, known))
    return BatchLayouts(main, deep, levels)


def check_kept(
    plan: EncodePlan, width: int, specs: Mapping[Modality, EncoderSpec], model: Any, keeper: Keeper
) -> None:
    """Raise RowsError unless the rows of all of a plan's items are there and fit the text embedding's width."""
    levels = levels_by_modality(specs, model, plan.items)
    for item in plan.items:
        keeper.check(plan, item, width, levels[item.modality])


def assemble(
    plan: EncodePlan,
    text: TextRows,
    specs: Mapping[Modality, EncoderSpec],
    model: Any,
    keeper: Keeper,
    mover: FeatureMover,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Put text rows and items' rows together.

    Args:
        plan: A plan that has ranges and whose items' rows are all there and fit.
        text: The look-up of the text rows.
        specs: The encoders; they say which modalities have deepstack rows, and in which form.
        model: Says how many levels deepstack has.
        keeper: Has the rows. It is released, or is when ``deepstack_rows`` are.
        mover: Brings rows that are kept on another device.

    Returns:
        Embeddings ``[T, hidden]``, and the keywords for the language model: ``input_deepstack_embeds`` ``[T,
        hidden * levels]`` or ``deepstack_rows`` where a range has a modality with deepstack, else none.

    Raises:
        RowsError: The plan's ranges don't fit the rows.
        LookupInputError: The embedding doesn't give one row for each id.
    """
    ids, table = text.source(plan)
    width = table.shape[-1]
    layouts = lay_out(plan, ids.shape[0], width, specs, model, keeper, ids.device, mover)
    main, deep = layouts.main, layouts.deep
    strict = text.strict and text.table is not None
    embeds = assemble_embeddings(ids, table, main.parts, main.row_map, strict=strict)
    if deep is None:
        keeper.release()
        return embeds, {}
    if any(spec.deepstack and spec.deepstack_form == "sparse" for spec in specs.values()):
        pool = deep.parts[0] if len(deep.parts) == 1 else torch.cat(deep.parts)
        rows = DeepstackRows(pool, deep.row_map.to(ids.device), layouts.levels, keeper.release)
        return embeds, {"deepstack_rows": rows}
    zeros = embeds.new_zeros(1, layouts.levels * width)
    dense = assemble_embeddings(torch.zeros_like(ids), zeros, deep.parts, deep.row_map)
    keeper.release()
    return embeds, {"input_deepstack_embeds": dense}


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch whose rows lie in an `EncoderPool`, for a captured prefill: what its graph has to be given.

    Held until `release`, which is called once the replay was launched; also a context manager.

    Attributes:
        row_map: For each row of the batch its row in the pool, or none.
        deepstack_map: The same for deepstack rows; None where no range has any.
        failed: The error of each request that was set aside, by index; its rows are covered by nothing.
        release: Ends the hold on the rows.
    """

    row_map: RowMap
    deepstack_map: RowMap | None
    failed: dict[int, Any]
    release: Callable[[], None] = field(repr=False, compare=False)

    def __enter__(self) -> "PreparedBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
