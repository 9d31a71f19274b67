"""How long does the host take to make a batch's metadata from its grids?

transformers' helpers, given a tensor on the CPU, against ``GridCache.batch``, with its frames kept ("ours") and with
nothing kept yet ("cold"): cumulative lengths, positions, and the windows of a Qwen2.5-VL or the table entries of a
Qwen3-VL. The results are compared, too. Needs no GPU, but transformers. Prints tables; ``--out FILE`` writes JSON.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import environment, host_us, show, write
from transformers import vision_utils

from mmgraph.towers.grids import Grid, GridCache, GridLayout, GridMetadata, PositionTable

Tensors = dict[str, torch.Tensor]


def windows_layout() -> GridLayout:
    """Qwen2.5-VL: patches of 14 pixels, windows of 112."""
    return GridLayout(merge=2, window=4, windowed=False)


def table_layout() -> GridLayout:
    """Qwen3-VL: a table of 48 by 48 entries."""
    return GridLayout(merge=2, table=PositionTable(48, align_corners=True))


def theirs(grids: torch.Tensor, layout: GridLayout) -> Tensors:
    """The same metadata by transformers' helpers, with the longest sequence and the inverse that its models make."""
    found = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
        "positions": vision_utils.get_vision_position_ids(grids, layout.merge),
    }
    found["max_seqlen"] = found["cu_seqlens"].diff().max()
    if layout.window is not None:
        order, cu_windows = vision_utils.get_vision_window_index(
            grids, layout.merge, layout.window * 2 * 14, 14
        )
        found |= {"order": order, "back": order.argsort(), "cu_windows": cu_windows}
    if layout.table is not None:
        taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, layout.table.side, align_corners=True, spatial_merge_size=layout.merge
        )
        found |= {"taps": taps, "tap_weights": weights}
    return found


def equal(mine: GridMetadata, other: Tensors) -> bool:
    arrays = mine.arrays()
    return mine.max_seqlen == int(other["max_seqlen"]) and all(
        np.array_equal(array, other[name].numpy()) for name, array in arrays.items()
    )


def batches(patch: int) -> dict[str, list[Grid]]:
    """Grids of images of 448 by 448 pixels, of mixed sizes, and of a video of 16 frames."""
    side = 448 // patch
    rng = np.random.default_rng(0)
    mixed = [(1, *map(int, 2 * rng.integers(4, 37, 2))) for _ in range(16)]
    return {
        "1 x 448 px": [(1, side, side)],
        "16 x 448 px": [(1, side, side)] * 16,
        "64 x 448 px": [(1, side, side)] * 64,
        "16 mixed": [(t, h, w) for t, h, w in mixed],
        "video, 16 frames of 448 px": [(16, side, side)],
    }


def measure(name: str, grids: list[Grid], layout: GridLayout, calls: Callable[[int], int]) -> dict[str, Any]:
    cpu, thw, cache = torch.device("cpu"), torch.tensor(grids), GridCache(layout)
    patches = sum(t * h * w for t, h, w in grids)
    result = {
        "tower": "windows" if layout.window is not None else "table",
        "batch": name,
        "patches": patches,
        "transformers us": host_us(lambda: theirs(thw, layout), cpu, calls(40)),
        "ours us": host_us(lambda: cache.batch(grids), cpu, calls(400)),
        "cold us": host_us(lambda: GridCache(layout).batch(grids), cpu, calls(100)),
        "equal": equal(cache.batch(grids), theirs(thw, layout)),
    }
    return result


def rows(smoke: bool = False) -> list[dict[str, Any]]:
    return [
        measure(name, grids, layout, (lambda n: 1) if smoke else (lambda n: n))
        for layout, patch in ((windows_layout(), 14), (table_layout(), 16))
        for name, grids in batches(patch).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one call of each, to see that it works")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(args.smoke)
    show("Metadata of a batch, host time", found)
    write(
        args.out,
        {"environment": {**environment(torch.device("cpu")), "numpy": np.__version__}, "rows": found},
    )


if __name__ == "__main__":
    main()
