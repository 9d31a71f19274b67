"""A manager that the tests of capture share."""

import pytest
from segments import OUTPUTS, SPECS, make_call, segment_means

from mmgraph.capture import BucketGrid, CaptureManager


@pytest.fixture(scope="module")
def graphs() -> CaptureManager:
    grid = BucketGrid(tokens=(4, 8, 16), batch=(2, 4))
    manager = CaptureManager(segment_means, inputs=SPECS, outputs=OUTPUTS, buckets=grid)
    return manager.precompile(example=make_call([3, 2], 1, seed=0), progress=False)
