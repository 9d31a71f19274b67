"""The buckets that the loop captures: what a serving setup knows before any request comes.

They follow from the step budget, the image limits and the longest prompt, never from the batch at hand, so that hits,
misses and padding are those of a real setup.
"""

from __future__ import annotations

import math

from mmgraph.capture import BucketGrid
from mmgraph.serving.model import ImageLimits


def geometric(first: int, last: int, *, steps: int = 1, multiple: int = 1) -> tuple[int, ...]:
    """Sizes from ``first`` to ``last`` that double every ``steps``.

    A call is padded by at most a factor ``2 ** (1 / steps)``, and more graphs are captured for it.

    Args:
        first: At least 1.
        last: The largest size, itself rounded up to a multiple; where it is at most ``first`` it is the only one.
        steps: Sizes to a doubling.
        multiple: Sizes are rounded up to multiples of it.
    """
    count = 0
    sizes: set[int] = set()
    while (size := first * 2 ** (count / steps)) < last:
        sizes.add(min(math.ceil(size / multiple), math.ceil(last / multiple)) * multiple)
        count += 1
    return tuple(sorted(sizes | {math.ceil(last / multiple) * multiple}))


def tower_grid(*, budget: int, limits: ImageLimits, patch: int, merge: int, steps: int = 1) -> BucketGrid:
    """Buckets of the tower: ``tokens`` (patches), ``batch`` (images) and ``seqlen`` (the largest image's patches).

    An image is encoded whole when a step first touches it, so a step encodes at most its budget and one image more.

    Args:
        budget: Tokens of a prefill step.
        limits: Pixels of an image.
        patch: Side of a patch in pixels.
        merge: Side of a merge block in patches.
        steps: Sizes to a doubling.
    """
    largest = limits.max_pixels // patch**2
    unit = merge**2
    return BucketGrid(
        tokens=geometric(max(unit, largest // 4), budget * unit + largest, steps=steps, multiple=unit),
        batch=(16,),
        # One size: the kernels do no work for the part of it that no image has.
        seqlen=(largest,),
    )


def prefill_grid(*, budget: int, longest: int, steps: int = 1) -> BucketGrid:
    """Buckets of prefill: ``tokens``, ``context`` (keys of all chunks), ``chunks``; deepstack rows follow tokens.

    Args:
        budget: Tokens of a prefill step.
        longest: The longest prompt; only one prompt of a step can have a part in the cache already.
        steps: Sizes to a doubling.
    """
    return BucketGrid(
        tokens=geometric(max(1, budget // 4), budget, steps=steps),
        context=(budget, -(-(budget + longest) // 64) * 64),
        chunks=(16,),
        derived={"visual": lambda b: b["tokens"]},
    )


def decode_grid(*, requests: int) -> BucketGrid:
    """Buckets of decode: ``batch``, powers of two from 4 up to the first that holds all requests.

    Args:
        requests: Requests that decode together.
    """
    return BucketGrid(batch=geometric(4, max(4, 1 << (requests - 1).bit_length())))
