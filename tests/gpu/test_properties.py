"""Invariant: on CUDA assembly, embedder and gradients equal the oracle exactly, and how a prompt is cut changes no row.

The properties are those of ``tests/testing/test_properties.py``, on another device.
"""

from collections.abc import Iterator

import mm_properties as properties
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.testing import BatchCase, MapCase, MaskCase, RangesCase, assert_scatter_correct, strategies

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True, scope="module")
def nothing_recorded() -> Iterator[None]:
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


@settings(max_examples=60)
@given(strategies.range_cases())
def test_assembly_is_the_oracle_s(case: RangesCase) -> None:
    properties.check_assembly(case, "cuda")


@settings(max_examples=60)
@given(strategies.mask_cases())
def test_merging_is_the_oracle_s(case: MaskCase) -> None:
    properties.check_merge(case, "cuda")


@settings(max_examples=60)
@given(strategies.map_cases(), st.integers(1, 3))
def test_deepstack_is_the_oracle_s(case: MapCase, levels: int) -> None:
    properties.check_deepstack(case, levels, "cuda")


@pytest.mark.parametrize("form", ["dense", "sparse"])
@settings(max_examples=60)
@given(strategies.batches())
def test_a_whole_call_is_the_oracle_s(form: str, case: BatchCase) -> None:
    properties.check_embedder(case, "cuda", form)


@settings(max_examples=60)
@given(strategies.range_cases(), strategies.mask_cases())
def test_gradients_are_the_oracle_s(case: RangesCase, mask: MaskCase) -> None:
    properties.check_gradients(case, mask, "cuda")


@settings(max_examples=30)
@given(st.integers(1, 8).flatmap(strategies.prompts))
def test_cuts_at_every_offset_change_no_row(case: BatchCase) -> None:
    properties.check_cuts(case, "cuda")


def test_the_ops_pass_the_public_check() -> None:
    assert_scatter_correct(ops.assemble_embeddings, form="map", device="cuda", gradients=True, examples=60)
    assert_scatter_correct(ops.merge_embeddings, form="mask", device="cuda", gradients=True, examples=60)
