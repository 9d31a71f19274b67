"""The buckets that the loop captures: what a serving setup knows before any request comes.

They follow from the step budget, the image limits and the longest prompt, never from the batch at hand, so that hits,
misses and padding are those of a real setup.
"""

from __future__ import annotations

from mmgraph.capture import BucketGrid
from mmgraph.serving.model import ImageLimits


def doubling(first: int, last: int) -> tuple[int, ...]:
    """``first``, twice that, and so on below ``last``, then ``last``.

    Args:
        first: At least 1.
        last: The largest size; where it is at most ``first`` it is the only one.
    """
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return (*sizes, last)


def tower_grid(*, budget: int, limits: ImageLimits, patch: int, merge: int) -> BucketGrid:
    """Buckets of the tower: ``tokens`` (patches), ``batch`` (images) and ``seqlen`` (the largest image's patches).

    An image is encoded whole when a step first touches it, so a step encodes at most its budget and one image more.

    Args:
        budget: Tokens of a prefill step.
        limits: Pixels of an image.
        patch: Side of a patch in pixels.
        merge: Side of a merge block in patches.
    """
    largest = limits.max_pixels // patch**2
    most = budget * merge**2 + largest
    unit = merge**2
    return BucketGrid(
        tokens=tuple(-(-size // unit) * unit for size in doubling(max(unit, largest // 2), most)),
        batch=(16,),
        seqlen=doubling(max(1, largest // 4), largest)[::2],
    )


def prefill_grid(*, budget: int, longest: int) -> BucketGrid:
    """Buckets of prefill: ``tokens``, ``context`` (keys of all chunks), ``chunks``; deepstack rows follow tokens.

    Args:
        budget: Tokens of a prefill step.
        longest: The longest prompt; only one prompt of a step can have a part in the cache already.
    """
    return BucketGrid(
        tokens=doubling(max(1, budget // 4), budget),
        context=(budget, -(-(budget + longest) // 64) * 64),
        chunks=(16,),
        derived={"visual": lambda b: b["tokens"]},
    )


def decode_grid(*, requests: int) -> BucketGrid:
    """Buckets of decode: ``batch``, powers of two from 4 up to the first that holds all requests.

    Args:
        requests: Requests that decode together.
    """
    return BucketGrid(batch=doubling(4, max(4, 1 << (requests - 1).bit_length())))
