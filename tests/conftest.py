"""Hypothesis profiles, the longest tests first, and the one rule by which a test is skipped: a missing device."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

torch.set_num_threads(1)


# Files with tests of many seconds each: at the end of a run, one of them would leave the other processes idle.
LONGEST = (
    "ops/test_triton_interpreted.py",
    "ops/test_tower_block_export.py",
    "bench/test_benchmarks.py",
    "test_transport_processes.py",
    "test_cli.py",
)
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))  # stable: the others stay as they are
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
