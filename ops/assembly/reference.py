"""Assembly in plain PyTorch: the readable definition of what the kernels do, and the CPU implementation.

Values are on the host here, so wrong ones raise at once instead of being recorded in the error flag.
"""

import torch

from mmgraph.ops import checks
from mmgraph.ops.errors import DataError
from mmgraph.ops.overlap import check_no_overlap

Tensor = torch.Tensor

_LARGEST_SOURCE = 2**31 - 1  # a row map's entries are of 32 bits


def assemble(input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool) -> Tensor:
    """Row i is ``pool[row_map[i]]`` where that is not negative, else the table's row of ``input_ids[i]``."""
    checks.check_assemble(input_ids, table, pool, row_map)
    out = table.new_empty((input_ids.shape[0], table.shape[1]))
    _fill(out, input_ids, table, pool, row_map, strict)
    return out


def assemble_out(
    input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool, *, out: Tensor
) -> None:
    """As ``assemble``, into ``out``; ``out`` is untouched if an error is raised."""
    checks.check_assemble_out(input_ids, table, pool, row_map, out)
    check_no_overlap(
        "assemble_embeddings_out", "out", out, table=table, pool=pool, input_ids=input_ids, row_map=row_map
    )
    _fill(out, input_ids, table, pool, row_map, strict)


def _fill(out: Tensor, input_ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor, strict: bool) -> None:
    check_row_map_values("assemble_embeddings", row_map, pool.shape[0])
    vocab = table.shape[0]
    text = (row_map < 0).nonzero().squeeze(1)
    covered = (row_map >= 0).nonzero().squeeze(1)
    ids = input_ids[text].long()
    if strict or vocab == 0:
        wrong = (ids < 0) | (ids >= vocab)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"assemble_embeddings: row {int(text[first])} has id {int(ids[first])}, outside the vocabulary of "
                f"{vocab}, and no pool row covers it ({int(wrong.sum())} such rows). Cover the row or correct the id."
            )
    out[text] = table[ids.clamp(0, max(vocab - 1, 0))]
    out[covered] = pool[row_map[covered].long()].to(out.dtype)


def check_row_map_values(op: str, row_map: Tensor, pool_rows: int, *, what: str = "row_map") -> None:
    """Raise DataError unless all values are -1 or rows of the pool."""
    wrong = (row_map < -1) | (row_map >= pool_rows)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"{op}: {what} values must be -1 or below the {'pool' if what == 'row_map' else 'buffer'}'s {pool_rows} "
            f"rows, row {first} has {int(row_map[first])} ({int(wrong.sum())} such rows)."
        )


def merge(embeds: Tensor, mask: Tensor, features: Tensor, num_placeholders: int | None) -> Tensor:
    """``embeds`` with its masked rows replaced by the feature rows in order."""
    checks.check_merge(embeds, mask, features)
    if num_placeholders is not None:
        checks.check_count(num_placeholders, features.shape[0])
    checks.check_count(int(mask.sum()), features.shape[0])
    out = embeds.clone(memory_format=torch.contiguous_format)
    out[mask] = features.to(embeds.dtype)
    return out


def deepstack_add(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> Tensor:
    """``hidden`` plus the level's slice of ``pool[row_map[i]]`` in the rows that the map covers."""
    checks.check_deepstack("deepstack_add", hidden, pool, row_map, level)
    check_row_map_values("deepstack_add", row_map, pool.shape[0])
    out = hidden.clone(memory_format=torch.contiguous_format)
    _add_level(out, pool, row_map, level)
    return out


def deepstack_add_in_place(hidden: Tensor, pool: Tensor, row_map: Tensor, level: int) -> None:
    """As ``deepstack_add``, in ``hidden``, which is untouched if an error is raised."""
    checks.check_deepstack_in_place(hidden, pool, row_map, level)
    check_no_overlap("deepstack_add_", "hidden", hidden, pool=pool, row_map=row_map)
    check_row_map_values("deepstack_add_", row_map, pool.shape[0])
    _add_level(hidden, pool, row_map, level)


def _add_level(out: Tensor, pool: Tensor, row_map: Tensor, level: int) -> None:
    width = out.shape[1]
    covered = (row_map >= 0).nonzero().squeeze(1)
    rows = pool[:, level * width : (level + 1) * width][row_map[covered].long()]
    out[covered] += rows.to(out.dtype)


def store_rows(rows: Tensor, places: Tensor, *, out: Tensor) -> None:
    """``out[places[i]]`` becomes ``rows[i]`` where the place isn't -1."""
    checks.check_store(rows, places, out)
    check_no_overlap("store_rows", "out", out, rows=rows, places=places)
    if out.stride(1) != 1:
        raise checks.not_adjacent("store_rows", "out", out)
    check_row_map_values("store_rows", places, out.shape[0], what="places")
    stored = (places >= 0).nonzero().squeeze(1)
    out[places[stored].long()] = rows[stored].to(out.dtype)


def expand_ranges(ranges: Tensor, num_rows: int) -> Tensor:
    """The row map of ranges ``[n, 3]``: first row, last row, first pool row."""
    checks.check_ranges(ranges, num_rows)
    out = ranges.new_full((num_rows,), -1)
    before = -1
    for index, (first, last, source) in enumerate(ranges.tolist()):
        if first == checks.UNUSED_RANGE:
            before = first  # none may follow that is used
            continue
        if first <= before or last < first or last >= num_rows:
            raise DataError(
                f"expand_ranges: ranges must ascend, not overlap, and end inside the {num_rows} rows; range {index} is "
                f"rows {first} to {last}. Unused ranges go last and begin at {checks.UNUSED_RANGE}."
            )
        source_last = source + last - first
        if source < 0 or source_last > _LARGEST_SOURCE:
            raise DataError(
                f"expand_ranges: pool rows must be between 0 and {_LARGEST_SOURCE}; range {index}, rows {first} to "
                f"{last}, takes the pool's {source} to {source_last}."
            )
        out[first : last + 1] = torch.arange(source, source_last + 1, dtype=out.dtype)
        before = last
    return out
