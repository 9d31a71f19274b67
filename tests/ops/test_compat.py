"""Invariant: kernels in an experimental language run on the releases that they were tried with, and on no others."""

import pytest
import torch
import triton

from mmgraph.ops import compat
from mmgraph.ops.compat import knows_gluon


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.9.0+git12ab", True), ("3.10.0", False),
        ("4.6.0", False), ("main", False),
    ],
)  # fmt: skip
def test_kernels_in_gluon_are_for_the_releases_that_they_were_tried_with(version, known, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", None)
    knows_gluon.cache_clear()
    try:
        assert knows_gluon() == known
        for place, name, value in ((triton.knobs.runtime, "interpret", True), (torch.version, "hip", "6.4")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, value)
                knows_gluon.cache_clear()
                assert not knows_gluon()
    finally:
        knows_gluon.cache_clear()


def test_the_triton_of_this_installation_is_one_of_them():
    """A newer one is no fault of the library's, but an alarm: try the kernels with it, and say so in ops/compat.py."""
    assert (
        compat.GLUON_RELEASES[0]
        <= tuple(int(part) for part in triton.__version__.split(".")[:2])
        <= compat.GLUON_RELEASES[1]
    )
