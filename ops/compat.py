"""What differs between the releases of Triton that the kernels run on."""

import re
from functools import lru_cache
from typing import Any

import torch

# Releases of Triton, first and last, whose Gluon takes our kernels. It is experimental there: others may differ.
GLUON_RELEASES = ((3, 6), (3, 9))


@lru_cache(maxsize=1)
def knows_gluon() -> bool:
    """Whether triton, which is installed, is of such a release, runs on NVIDIA's GPUs and doesn't interpret."""
    import triton

    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if found is None or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    return GLUON_RELEASES[0] <= (int(found[1]), int(found[2])) <= GLUON_RELEASES[1]


def gluon_async_load() -> Any:
    """Gluon's copy from global to shared memory: ``(smem, pointers, mask=)``. It was renamed in Triton 3.8."""
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    return getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
