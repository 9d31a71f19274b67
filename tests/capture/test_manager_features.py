"""Invariant: leases, variants, bounds, misses and stale weights behave on the recorder as they are documented."""

import pytest
import torch
from manager_features import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_feature(name: str) -> None:
    CHECKS[name](torch.device("cpu"))
