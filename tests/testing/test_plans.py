"""Invariant: ``assert_plan_correct`` passes the planner and finds planted faults, with a case that shows them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase

from mmgraph.errors import OptionError
from mmgraph.inputs import MultimodalForwardContext
from mmgraph.planning import EncodePlan, build_plan
from mmgraph.testing import BatchCase, PlanMismatch, assert_plan_correct, searching

Planner = Callable[[MultimodalForwardContext, int], Any]


def test_the_planner_passes() -> None:
    assert_plan_correct(build_plan)
    assert_plan_correct(build_plan, derandomize=False, examples=50)


def changed(change: Callable[[EncodePlan], EncodePlan]) -> Planner:
    return lambda ctx, tokens: change(build_plan(ctx, tokens))


def moved(**steps: int) -> Planner:
    def change(plan: EncodePlan) -> EncodePlan:
        ranges = [
            entry._replace(**{name: getattr(entry, name) + step for name, step in steps.items()})
            for entry in plan.scatter_ranges
        ]
        return dataclasses.replace(plan, scatter_ranges=ranges)

    return changed(change)


def prefix_ignored(ctx: MultimodalForwardContext, tokens: int) -> EncodePlan:
    return build_plan(dataclasses.replace(ctx, extend_prefix_lens=[0] * len(ctx.extend_seq_lens or ())), tokens)


def hashes_ignored(ctx: MultimodalForwardContext, tokens: int) -> EncodePlan:
    for inputs in ctx.mm_inputs or ():
        for item in inputs.mm_items if inputs is not None else ():
            if item is not None:
                item.hash = None
    return build_plan(ctx, tokens)


FAULTS: dict[str, Planner] = {
    "exclusive end": moved(flat_dst_end=1),
    "source shifted": moved(item_src_start=1, item_src_end=1),
    "last range dropped": changed(
        lambda plan: dataclasses.replace(plan, scatter_ranges=plan.scatter_ranges[:-1])
    ),
    "encoded again": changed(
        lambda plan: dataclasses.replace(
            plan,
            misses_by_modality={
                modality: [item for item in plan.items if item.modality is modality]
                for modality in {item.modality: None for item in plan.items}
            },
        )
    ),
    "aliases forgotten": changed(lambda plan: dataclasses.replace(plan, aliases_by_canonical={})),
    "nothing encoded": changed(lambda plan: dataclasses.replace(plan, misses_by_modality={})),
    "requests forgotten": changed(
        lambda plan: dataclasses.replace(plan, range_requests=[0 for _ in plan.range_requests])
    ),
    "prefix ignored": prefix_ignored,
    "twins encoded apart": hashes_ignored,
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_planners_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_PHASES", (Phase.generate,))  # shrinking finds no more
    with pytest.raises(PlanMismatch) as caught:
        assert_plan_correct(FAULTS[name])
    assert isinstance(caught.value.case, BatchCase)


def test_the_message_says_what_came_and_makes_the_case_again() -> None:
    with pytest.raises(PlanMismatch, match=r"The plan is wrong\. Its ranges are ") as caught:
        assert_plan_correct(FAULTS["exclusive end"])
    case = caught.value.case
    text = str(caught.value)
    assert (
        "Its ranges are [(0, 1, item 0 of request 0, 0, 0)], not [(0, 0, item 0 of request 0, 0, 0)]." in text
    )
    assert len(case.ids) == 1
    names: dict[str, Any] = {"fn": FAULTS["exclusive end"]}
    exec(text.split("The smallest case found:\n\n")[1], names)
    assert names["case"] == case
    assert names["plan"].scatter_ranges[0].flat_dst_end == 1


def test_a_planner_that_raises_is_told_with_its_cause() -> None:
    def broken(ctx: MultimodalForwardContext, tokens: int) -> EncodePlan:
        raise KeyError("boom")

    with pytest.raises(PlanMismatch, match="It raised KeyError: 'boom'") as caught:
        assert_plan_correct(broken)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(OptionError, match="examples must be a positive integer"):
        assert_plan_correct(build_plan, examples=-1)
