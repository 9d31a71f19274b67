"""The properties that hold on every device: each takes one drawn case and a device, and compares with the oracle."""

import dataclasses
from typing import Any

import torch

from mmgraph import ops
from mmgraph.embedder import MultimodalEmbedder
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.planning import build_plan
from mmgraph.testing import Batch, BatchCase, MapCase, MaskCase, RangesCase, reference
from mmgraph.testing.contents import coded_rows
from mmgraph.testing.strategies import single_cuts


def check_plan(case: BatchCase) -> None:
    """Ranges, canonical items, aliases and misses are the oracle's, and nothing is changed."""
    batch = case.build()
    kept = [(item, item.feature, item.encoded) for item in batch.rows]
    expected = reference.plan(batch.ctx)
    plan = build_plan(batch.ctx, batch.input_ids.shape[0])
    got = [(*entry, request) for entry, request in zip(plan.scatter_ranges, plan.range_requests, strict=True)]
    assert got == [(r.dst_start, r.dst_end, r.item, r.src_start, r.src_end, r.request) for r in expected.ranges]
    assert plan.items == expected.canonicals
    assert plan.aliases_by_canonical == expected.aliases
    assert list(plan.misses_by_modality.items()) == list(expected.misses.items())
    assert all(item.feature is feature and item.encoded is rows for item, feature, rows in kept)


def joined(
    case: RangesCase, sources: list[torch.Tensor], table: torch.Tensor
) -> tuple[torch.Tensor, ops.RowMap]:
    """The sources as one pool, which promotes their dtypes and so loses nothing, and the map to it."""
    pool = torch.cat(sources) if sources else table.new_empty(0, case.width)
    row_map = ops.RowMap.from_ranges(
        len(case.ids),
        [entry.dst_start for entry in case.ranges],
        [entry.dst_end for entry in case.ranges],
        [sum(case.sources[: entry.source]) + entry.src_start for entry in case.ranges],
        pool_rows=pool.shape[0],
    )
    return pool, row_map


def check_assembly(case: RangesCase, device: str) -> None:
    """Both forms of assembly, from a row map and from its tensor."""
    expected = reference.assemble(*case.arguments())
    ids, table, sources, _ = case.arguments(device)
    pool, row_map = joined(case, sources, table)
    got = ops.assemble_embeddings(ids, table, pool, row_map)
    assert (got.dtype, got.device.type) == (expected.dtype, torch.device(device).type)
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(ops.assemble_embeddings(ids, table, pool, row_map.to(device)).cpu(), expected)
    whole = torch.full((len(case.ids) + 2, case.width), float("nan"), dtype=case.dtype, device=device)
    ops.assemble_embeddings_out(ids, table, pool, row_map, out=whole[: len(case.ids)])
    assert torch.equal(whole[: len(case.ids)].cpu(), expected)
    assert bool(whole[len(case.ids) :].isnan().all())


def check_merge(case: MaskCase, device: str) -> None:
    """Merging, with the count told and without."""
    embeds, mask, features = case.arguments()
    expected = reference.merge(embeds, mask.tolist(), features)
    given = case.arguments(device)
    assert torch.equal(ops.merge_embeddings(*given).cpu(), expected)
    assert torch.equal(ops.merge_embeddings(*given, num_placeholders=sum(case.mask)).cpu(), expected)


def check_deepstack(case: MapCase, levels: int, device: str) -> None:
    """Adding each level equals adding the dense buffer's part."""
    hidden = coded_rows(-1, len(case.ids), case.width, seed=case.seed, dtype=case.dtype)
    pool = coded_rows(1, case.pool, levels * case.width, seed=case.seed, dtype=case.pool_dtype)
    row_map = torch.tensor(case.row_map, dtype=torch.int32, device=device)
    for level in range(levels):
        expected = reference.deepstack_add(hidden, pool, case.row_map, level)
        got = ops.deepstack_add(hidden.to(device), pool.to(device), row_map, level)
        assert torch.equal(got.cpu(), expected)


def check_embedder(case: BatchCase, device: str, form: str) -> None:
    """Embeddings, deepstack rows, and what was encoded are the oracle's; what was used up is dropped."""
    batch = case.build(device, deepstack_form=form)
    tokens = batch.input_ids.shape[0]
    expected = reference.plan(batch.ctx)
    embeds = reference.embed(batch.input_ids.cpu(), batch.table.cpu(), batch.ctx, batch.rows)
    deep_rows = {
        item: rows[:, case.width :]
        for item, rows in batch.rows.items()
        if item.modality.value in case.deepstack
    }
    deep = reference.embed_deepstack(
        tokens, batch.ctx, deep_rows, width=case.width * case.levels, dtype=case.dtype
    )
    got, kwargs = apply(batch, batch.input_ids, batch.ctx)
    assert batch.calls == list(expected.misses.values())
    if not expected.ranges:
        assert (got, kwargs) == (None, {})
        return
    assert torch.equal(got.cpu(), embeds)
    used = [*expected.canonicals, *(twin for twins in expected.aliases.values() for twin in twins)]
    assert all(item.feature is None and item.encoded is not None for item in used)
    if not any(entry.item in deep_rows for entry in expected.ranges):
        assert kwargs == {}
    elif form == "dense":
        assert torch.equal(kwargs["input_deepstack_embeds"].cpu(), deep)
    else:
        rows = kwargs["deepstack_rows"]
        for level in range(case.levels):
            part = deep[:, level * case.width : (level + 1) * case.width]
            added = ops.deepstack_add(got, rows.pool, rows.row_map, level)
            assert torch.equal(added.cpu(), embeds + part)


def apply(batch: Batch, ids: torch.Tensor, ctx: MultimodalForwardContext) -> tuple[Any, dict[str, Any]]:
    return MultimodalEmbedder().apply(ids, batch.table, ctx, batch.encoders, batch.model)


def check_gradients(case: RangesCase, mask: MaskCase, device: str) -> None:
    """In float64, exactly: the upstream gradients are small integers, so that sums don't depend on their order."""
    case = dataclasses.replace(case, dtype=torch.float64, source_dtypes=(torch.float64,) * len(case.sources))
    ids, table, sources, _ = case.arguments(device)
    for tensor in (table, *sources):
        tensor.requires_grad_()
    pool, row_map = joined(case, sources, table)
    upstream = upstream_of(len(case.ids), case.width)
    ops.assemble_embeddings(ids, table, pool, row_map).backward(upstream.to(device))
    of_table, of_sources = reference.assemble_gradients(upstream, *case.arguments())
    check_gradient(table, of_table)
    for source, expected in zip(sources, of_sources, strict=True):
        check_gradient(source, expected)

    mask = dataclasses.replace(mask, dtype=torch.float64, feature_dtype=torch.float64)
    embeds, flags, features = mask.arguments(device)
    embeds.requires_grad_()
    features.requires_grad_()
    upstream = upstream_of(len(mask.mask), mask.width)
    ops.merge_embeddings(embeds, flags, features).backward(upstream.to(device))
    of_embeds, of_features = reference.merge_gradients(
        upstream, embeds.detach().cpu(), mask.mask, features.detach().cpu()
    )
    check_gradient(embeds, of_embeds)
    check_gradient(features, of_features)


def upstream_of(rows: int, width: int) -> torch.Tensor:
    return (1 + torch.arange(rows * width) % 11).reshape(rows, width).double()


def check_gradient(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    got = torch.zeros_like(expected) if tensor.grad is None else tensor.grad.cpu()
    assert torch.equal(got, expected)


def check_cuts(case: BatchCase, device: str) -> None:
    """Each cut of the prompt, at every offset and row by row, gives the rows of the whole, and encodes an item once."""
    prompt = len(case.ids)
    whole = case.build(device)
    expected = reference.embed(whole.input_ids.cpu(), whole.table.cpu(), whole.ctx, whole.rows)
    for chunks in ((case.requests[0].chunk,), *single_cuts(prompt)):
        batch = case.build(device)
        parts = []
        for chunk in chunks:
            ids = batch.input_ids[chunk.prefix : chunk.prefix + chunk.length]
            ctx = MultimodalForwardContext(batch.ctx.mm_inputs, [chunk.prefix], [chunk.length])
            embeds, _ = apply(batch, ids, ctx)
            text = reference.assemble(ids.cpu(), batch.table.cpu(), [], [])
            parts.append(text if embeds is None else embeds.cpu())
        assert torch.equal(torch.cat(parts), expected), chunks
        encoded = [item for call in batch.calls for item in call]
        assert len(encoded) == len(set(encoded))
