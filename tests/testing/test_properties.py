"""Invariant: plan, assembly, embedder and gradients equal the oracle of ``mmgraph.testing.reference`` exactly, and how
a prompt is cut changes no row.
"""

import mm_properties as properties
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.testing import BatchCase, MapCase, MaskCase, RangesCase, strategies

EXAMPLES = 500
# Where an example is a whole call, a call for every cut, or a backward: the batches are drawn as in the others.
DEAR = 150


@settings(max_examples=EXAMPLES)
@given(strategies.batches())
def test_the_plan_is_the_oracle_s(case: BatchCase) -> None:
    properties.check_plan(case)


@settings(max_examples=EXAMPLES)
@given(strategies.range_cases())
def test_assembly_is_the_oracle_s(case: RangesCase) -> None:
    properties.check_assembly(case, "cpu")


@settings(max_examples=EXAMPLES)
@given(strategies.mask_cases())
def test_merging_is_the_oracle_s(case: MaskCase) -> None:
    properties.check_merge(case, "cpu")


@settings(max_examples=EXAMPLES)
@given(strategies.map_cases(), st.integers(1, 3))
def test_deepstack_is_the_oracle_s(case: MapCase, levels: int) -> None:
    properties.check_deepstack(case, levels, "cpu")


@pytest.mark.parametrize("form", ["dense", "sparse"])
@settings(max_examples=DEAR)
@given(strategies.batches())
def test_a_whole_call_is_the_oracle_s(form: str, case: BatchCase) -> None:
    properties.check_embedder(case, "cpu", form)


@settings(max_examples=DEAR)
@given(strategies.range_cases(), strategies.mask_cases())
def test_gradients_are_the_oracle_s(case: RangesCase, mask: MaskCase) -> None:
    properties.check_gradients(case, mask, "cpu")


@settings(max_examples=DEAR)
@given(st.integers(1, 10).flatmap(strategies.prompts))
def test_cuts_at_every_offset_change_no_row(case: BatchCase) -> None:
    properties.check_cuts(case, "cpu")
