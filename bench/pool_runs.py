"""Into how many runs does a full pool split images, and how many rows do page ends waste?

100,000 images of random sizes go through a pool's bookkeeping, several a batch, while the least recently used make room
and one image in four is one that was seen before. Counted from the first eviction on. Runs on the host alone; prints
JSON, and ``--out FILE`` writes it too.
"""

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np

from mmgraph.pool_book import Entry, PoolBook
from mmgraph.pool_places import joined
from mmgraph.pool_streams import HostClock

POOL_ROWS = 65_536
PATCH = 32  # pixels to a side of what becomes one row


def image_rows(rng: random.Random) -> int:
    """Rows of an image of 0.06 to 4 megapixels, at most three times as wide as high or as high as wide."""
    area = math.exp(rng.uniform(math.log(256 * 256), math.log(2048 * 2048)))
    ratio = math.exp(rng.uniform(-math.log(3), math.log(3)))
    height, width = math.sqrt(area / ratio), math.sqrt(area * ratio)
    return max(1, round(height / PATCH)) * max(1, round(width / PATCH))


def simulate(page_rows: int, images: int, seed: int = 0) -> dict[str, Any]:
    rng, clock = random.Random(seed), HostClock()
    book = PoolBook(POOL_ROWS // page_rows, page_rows, clock.record("host"))
    sizes: dict[Hashable, int] = {}
    runs: list[int] = []
    batch_runs: list[int] = []
    batch_images: list[int] = []
    padding: list[float] = []
    while len(sizes) < images:
        held: list[Entry] = []
        wanted: dict[Hashable, int] = {}
        for _ in range(rng.randint(1, 8)):
            if sizes and rng.random() < 0.25:
                seen = book.find(max(0, len(sizes) - 1 - int(rng.expovariate(1 / 60))))
                if seen is not None and seen not in held:
                    book.pin(seen)
                    held.append(seen)
            else:
                wanted[len(sizes)] = sizes[len(sizes)] = image_rows(rng)
        entries = book.take(wanted)
        ready = clock.record("host")
        for entry in entries:
            book.publish(entry, ready)
        if book.evictions and entries:
            runs += [len(entry.runs) for entry in entries]
            batch_runs.append(len(joined(entry.places for entry in entries).starts))
            batch_images.append(len(entries))
            stats = book.stats()
            padding.append(stats.rows_padding / stats.rows_used)
        for entry in (*held, *entries):
            book.unpin(entry, {"host": ready})
    stats = book.stats()
    several = [runs for runs, count in zip(batch_runs, batch_images, strict=True) if count > 1]
    return {
        "page_rows": page_rows,
        "runs per image": round(statistics.mean(runs), 4),
        "most runs of an image": max(runs),
        "images in one run": round(runs.count(1) / len(runs), 4),
        "padding": round(statistics.mean(padding), 5),
        "images in the pool": stats.items,
        "runs per batch": round(statistics.mean(batch_runs), 3),
        "images per batch": round(statistics.mean(batch_images), 3),
        "batches of several images in one run": round(several.count(1) / len(several), 4),
        "evictions": stats.evictions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(1)
    rows = [image_rows(rng) for _ in range(10_000)]
    results = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "pool rows": POOL_ROWS,
        "images": args.images,
        "rows of an image": {"mean": round(statistics.mean(rows)), "least": min(rows), "most": max(rows)},
        "results": [simulate(page_rows, args.images) for page_rows in (1, 16, 64)],
    }
    print(json.dumps(results, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
