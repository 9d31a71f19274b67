"""Rows: what an encoder may return, what an item may keep.

Promises: a check reads shapes, types and devices alone, so it never waits for a device; it changes nothing, and
rows that pass can be cut, kept and joined.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmgraph.encoder_spec import deepstack_levels
from mmgraph.errors import EncoderOutputError, RowsError
from mmgraph.items import MultimodalDataItem, describe_item

Refusal = Callable[[str, str], EncoderOutputError]
"""Makes the error from what was expected and what came."""


def check_rows(item: MultimodalDataItem, width: int | None, levels: int) -> None:
    """Check the rows that an item keeps.

    Args:
        item: An item.
        width: The text embedding's width, where known.
        levels: Deepstack levels that it must have rows for.

    Raises:
        RowsError: There are none, or of the wrong type, number or width.
    """
    tokens = item.num_tokens
    deep_width = None if width is None else levels * width
    if not _fit(item.encoded, tokens, width):
        raise _rows_error(item, "encoded", item.encoded, width)
    if levels and not _fit(item.encoded_deepstack, tokens, deep_width):
        raise _rows_error(item, "encoded_deepstack", item.encoded_deepstack, deep_width)


def joined_output(output: Any, counts: Sequence[int], refusal: Refusal) -> torch.Tensor:
    """Bring what an encoder returned into one tensor of rows.

    One tensor of rows shows only how many there are in all. Where there are as many tensors as items, or a stack of as
    many matrices, each is taken for its item's rows and counted: else a row too many in one and too few in another
    would cancel out, and every row between them would go to the wrong item.

    Args:
        output: A tensor, or a list or tuple of tensors; leading shapes are flattened.
        counts: The items' token counts.
        refusal: Makes the error.

    Returns:
        ``[sum(counts), width]``.

    Raises:
        EncoderOutputError: It isn't that.
    """
    tensors = list(output) if isinstance(output, list | tuple) else [output]
    stacked = _usable(output) and output.dim() == 3
    for tensor in tensors:
        if not _usable(tensor) or tensor.dim() == 0:
            raise refusal("a floating-point tensor of rows, dense and with data", described(tensor))
    flat = [tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1]) for tensor in tensors]
    if len({(tensor.shape[1], tensor.device) for tensor in flat}) != 1:
        raise refusal("rows of one width on one device", str([described(tensor) for tensor in flat]))
    each = [output.shape[1]] * output.shape[0] if stacked else [tensor.shape[0] for tensor in flat]
    if len(each) == len(counts) > 1 and each != list(counts):
        raise refusal(f"{sum(counts)} rows, per item {list(counts)}", f"{sum(each)} rows, per item {each}")
    rows = flat[0] if len(flat) == 1 else torch.cat(flat)
    if rows.shape[0] != sum(counts):
        raise refusal(f"{sum(counts)} rows, per item {list(counts)}", f"{rows.shape[0]} rows")
    return rows


def separated_rows(
    model: Any, rows: torch.Tensor, width: int | None, refusal: Refusal
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the model take main and deepstack rows apart.

    Args:
        model: Has ``separate_deepstack_embeds`` and ``deepstack_visual_indexes``.
        rows: The encoder's rows ``[n, anything]``.
        width: The text embedding's width, where known.
        refusal: Makes the error.

    Returns:
        ``[n, width]`` and ``[n, levels * width]``.

    Raises:
        EncoderOutputError: The model gives something else.
    """
    levels = deepstack_levels(model)
    pair = model.separate_deepstack_embeds(rows)
    if not (isinstance(pair, list | tuple) and len(pair) == 2):
        raise refusal("main and deep rows from separate_deepstack_embeds", type(pair).__name__)
    main, deep = pair
    if width is None and isinstance(main, torch.Tensor) and main.dim() == 2:
        width = main.shape[1]
    expected = [[rows.shape[0], width], [rows.shape[0], (width or 0) * levels]]
    shapes = [list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in pair]
    if shapes != expected:
        raise refusal(f"main and deep rows of shapes {expected} ({levels} deepstack levels)", f"{shapes}")
    if not (_usable(main) and _usable(deep)):
        raise refusal(
            "floating-point main and deep rows from separate_deepstack_embeds, dense and with data",
            f"{described(main)} and {described(deep)}",
        )
    return main, deep


def cut_rows(rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Cut rows into pieces with memory of their own: a view would keep the whole batch's output alive."""
    if len(counts) == 1 or rows.requires_grad:
        return [part.clone(memory_format=torch.contiguous_format) for part in rows.split(counts)]
    parts = [rows.new_empty((count, rows.shape[1])) for count in counts]
    torch.split_with_sizes_copy(rows, counts, dim=0, out=parts)  # one launch for all
    return parts


def described(value: Any) -> str:
    """Name a value by its type, and a tensor by dtype, shape and where it lies if that is unusual."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    unusual = "" if value.layout == torch.strided else f" of layout {value.layout}"
    return f"{value.dtype} {list(value.shape)}{unusual}{' on meta' if value.is_meta else ''}"


def _usable(rows: Any) -> bool:
    return (
        isinstance(rows, torch.Tensor)
        and rows.is_floating_point()
        and rows.layout == torch.strided
        and not rows.is_meta
    )


def _fit(rows: Any, tokens: int, width: int | None) -> bool:
    if not _usable(rows):
        return False
    shape = rows.shape
    return len(shape) == 2 and shape[0] == tokens and (width is None or shape[1] == width)


def _rows_error(item: MultimodalDataItem, name: str, rows: Any, width: int | None) -> RowsError:
    came = type(rows).__name__
    if isinstance(rows, torch.Tensor):
        came = f"{list(rows.shape)} of {rows.dtype}{' on meta' if rows.is_meta else ''}"
    return RowsError(
        f"{describe_item(item)}: {name} must be a floating-point tensor of shape "
        f"[{item.num_tokens}, {'width' if width is None else width}], got {came}; "
        "encode the item first, or correct the rows or the offsets"
    )
