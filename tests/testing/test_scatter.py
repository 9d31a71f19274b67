"""Invariant: ``assert_scatter_correct`` passes what is right and finds each planted fault, names the row, and gives a
case that shows the fault again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase
from hypothesis.errors import HypothesisException

from mmgraph import ops
from mmgraph.errors import OptionError
from mmgraph.testing import (
    MaskCase,
    RangesCase,
    ScatterMismatch,
    SourceRange,
    assert_scatter_correct,
    searching,
)

Tensor = torch.Tensor


def clamped(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long().clamp(0, table.shape[0] - 1)]


def scatter(
    ids: Tensor,
    table: Tensor,
    sources: list[Tensor],
    ranges: list[SourceRange],
    *,
    look_up: Callable[[Tensor, Tensor], Tensor] = clamped,
    change: Callable[[SourceRange], tuple[int, int, int]] | None = None,
    cast: Callable[[Tensor, Tensor], Tensor] = lambda rows, out: rows.to(out.dtype),
) -> Tensor:
    """A right scatter, with places where faults can be planted."""
    out = look_up(ids, table)
    for entry in ranges:
        start, end, first = (
            (entry.dst_start, entry.dst_end, entry.src_start) if change is None else change(entry)
        )
        for step in range(min(end, len(ids) - 1) - start + 1):
            place = first + step
            if 0 <= place < len(sources[entry.source]):
                out[start + step] = cast(sources[entry.source][place], out)
    return out


def map_scatter(ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor) -> Tensor:
    out = clamped(ids, table)
    out[row_map >= 0] = pool[row_map[row_map >= 0].long()].to(out.dtype)
    return out


def mask_scatter(embeds: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    out = embeds.clone()
    out[mask] = features.to(out.dtype)
    return out


RIGHT: dict[str, Callable[..., Tensor]] = {"ranges": scatter, "map": map_scatter, "mask": mask_scatter}


@pytest.mark.parametrize("derandomize", [True, False])
@pytest.mark.parametrize("form", RIGHT)
def test_what_is_right_passes(form: str, derandomize: bool) -> None:
    assert_scatter_correct(RIGHT[form], form=form, gradients=True, derandomize=derandomize, examples=100)


def test_the_ops_pass() -> None:
    assert_scatter_correct(ops.assemble_embeddings, form="map", gradients=True)
    assert_scatter_correct(ops.merge_embeddings, form="mask", gradients=True)


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinking takes the most time and changes nothing of whether a fault is found."""
    monkeypatch.setattr(searching, "_PHASES", (Phase.generate,))


def refused(fn: Callable[..., Any], **options: Any) -> ScatterMismatch:
    with pytest.raises(ScatterMismatch) as caught:
        assert_scatter_correct(fn, **options)
    return caught.value


def without_last_row(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    last = [r for r in ranges if r.dst_end == len(ids) - 1]
    return scatter(
        ids,
        table,
        sources,
        ranges,
        change=lambda r: (r.dst_start, r.dst_end - (r in last), r.src_start),
    )


def one_row_for_all(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    out = clamped(ids, table)
    for r in ranges:
        out[r.dst_start : r.dst_end + 1] = sources[r.source][r.src_start].to(out.dtype)
    return out


def fault(**planted: Any) -> Callable[..., Tensor]:
    return lambda ids, table, sources, ranges: scatter(ids, table, sources, ranges, **planted)


def table_written(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    out = scatter(ids, table, sources, ranges)
    if ranges:
        table[0] = 0
    return out


def sources_reversed(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    out = scatter(ids, table, sources, ranges)
    sources.reverse()
    return out


def ids_clamped_in_place(ids: Tensor, table: Tensor, *rest: Any) -> Tensor:
    return scatter(ids.clamp_(0, table.shape[0] - 1), table, *rest)


def view_of_source(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    if len(ranges) == 1 and ranges[0].dst_end - ranges[0].dst_start + 1 == len(ids):
        r = ranges[0]
        return sources[r.source][r.src_start : r.src_start + len(ids)].to(table.dtype)
    return scatter(ids, table, sources, ranges)


def ranges_popped(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
    out = scatter(ids, table, sources, ranges)
    ranges.clear()
    return out


FAULTS = {
    "destination begins late": fault(change=lambda r: (r.dst_start + 1, r.dst_end, r.src_start + 1)),
    "destination begins early": fault(change=lambda r: (max(r.dst_start - 1, 0), r.dst_end, r.src_start)),
    "exclusive end": fault(change=lambda r: (r.dst_start, r.dst_end - 1, r.src_start)),
    "end one too far": fault(change=lambda r: (r.dst_start, r.dst_end + 1, r.src_start)),
    "source one too far": fault(change=lambda r: (r.dst_start, r.dst_end, r.src_start + 1)),
    "source one too early": fault(change=lambda r: (r.dst_start, r.dst_end, max(r.src_start - 1, 0))),
    "source from its first row": fault(change=lambda r: (r.dst_start, r.dst_end, 0)),
    "last row missing": without_last_row,
    "last range dropped": lambda ids, table, sources, ranges: scatter(ids, table, sources, ranges[:-1]),
    "first range dropped": lambda ids, table, sources, ranges: scatter(ids, table, sources, ranges[1:]),
    "only four rows of a range": fault(
        change=lambda r: (r.dst_start, min(r.dst_end, r.dst_start + 3), r.src_start)
    ),
    "range that reaches the last row dropped": lambda ids, table, sources, ranges: scatter(
        ids,
        table,
        sources,
        [r for r in ranges if r.dst_end < len(ids) - 1],
    ),
    "one row broadcast": one_row_for_all,
    "overlaps in reverse": lambda ids, table, sources, ranges: scatter(ids, table, sources, ranges[::-1]),
    "overlaps by position": lambda ids, table, sources, ranges: scatter(
        ids, table, sources, sorted(ranges, key=lambda r: r.dst_start)
    ),
    "first source for all": lambda ids, table, sources, ranges: scatter(
        ids, table, sources, [SourceRange(r.dst_start, r.dst_end, 0, r.src_start) for r in ranges]
    ),
    "bits for values": fault(cast=lambda rows, out: rows.view(torch.int16)[: out.shape[1]].to(out.dtype)),
    "cast through float16": fault(cast=lambda rows, out: rows.half().to(out.dtype)),
    "cast through bfloat16": fault(cast=lambda rows, out: rows.bfloat16().to(out.dtype)),
    "source dtype kept": lambda ids, table, sources, ranges: scatter(
        ids, table.to(sources[ranges[0].source].dtype) if ranges else table, sources, ranges
    ),
    "ids not clamped": fault(look_up=lambda ids, table: table[ids.long()]),
    "negative ids from the end": fault(look_up=lambda ids, table: table[ids.long().clamp_max(len(table) - 1)]),
    "ids by their remainder": fault(look_up=lambda ids, table: table[ids.long() % len(table)]),
    "ids cut to 32 bits": fault(look_up=lambda ids, table: clamped(ids.int(), table)),
    "table written": table_written,
    "ids written": ids_clamped_in_place,
    "sources reordered": sources_reversed,
    "ranges consumed": ranges_popped,
    "a view of a source": view_of_source,
    "a source replaced in the list": lambda ids, table, sources, ranges: [
        scatter(ids, table, sources, ranges),
        sources and sources.__setitem__(0, sources[0].clone()),
    ][0],
    "transposed": lambda *given: scatter(*given).t(),
    "a row too many": lambda *given: torch.cat([scatter(*given), given[1][:1]]),
    "wrong dtype": lambda *given: scatter(*given).double(),
    "no tensor": lambda *given: scatter(*given).tolist(),
    "nothing": lambda *given: None,
    "garbage in uncovered rows": fault(
        look_up=lambda ids, table: torch.full((len(ids), table.shape[1]), float("nan")).to(table.dtype)
    ),
    "needs contiguous tables": fault(
        look_up=lambda ids, table: (
            clamped(ids, table)
            if table.is_contiguous()
            else clamped(ids, table.as_strided(table.shape, (table.shape[1], 1)))
        )
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_ranges_are_found(name: str, unshrunk: None) -> None:
    refused(FAULTS[name])


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_covered_ids_that_are_looked_up_are_found_where_text_ids_are_not_outside(
    ids_dtype: torch.dtype,
) -> None:
    def looks_up_all(ids: Tensor, *rest: Any) -> Tensor:
        return scatter(
            ids,
            *rest,
            look_up=lambda ids, table: table[ids.long()] if ids.dtype == ids_dtype else clamped(ids, table),
        )

    error = refused(looks_up_all, outside_ids=False)
    assert isinstance(error.__cause__, IndexError)
    assert "It raised IndexError" in str(error)
    assert error.case.ranges


MAP_FAULTS = {
    "row 0 taken for none": lambda ids, table, pool, row_map: map_scatter(
        ids, table, pool, torch.where(row_map > 0, row_map, -1)
    ),
    "pool by position": lambda ids, table, pool, row_map: map_scatter(
        ids, table, pool, torch.where(row_map >= 0, ((row_map >= 0).cumsum(0) - 1).clamp_max(len(pool) - 1), -1)
    ),
    "the next row": lambda ids, table, pool, row_map: map_scatter(
        ids, table, pool, torch.where(row_map >= 0, (row_map + 1).clamp_max(len(pool) - 1), -1)
    ),
    "map written": lambda ids, table, pool, row_map: map_scatter(ids, table, pool, row_map.clamp_(max=0)),
    "text rows zero": lambda ids, table, pool, row_map: (
        map_scatter(ids, table, pool, row_map) * (row_map >= 0).to(table.dtype)[:, None]
    ),
}


@pytest.mark.parametrize("name", MAP_FAULTS)
def test_faults_of_maps_are_found(name: str, unshrunk: None) -> None:
    refused(MAP_FAULTS[name], form="map")


def over_wide(tensor: Tensor) -> Tensor:
    """All columns of the matrix that the tensor is columns of."""
    return tensor.as_strided(
        (tensor.shape[0], tensor.stride(0)), (tensor.stride(0), 1), tensor.storage_offset() - 1
    )


def with_effect(effect: Callable[[Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    """A right scatter that does something to the table and the pool."""

    def fn(ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor) -> Tensor:
        out = map_scatter(ids, table, pool, row_map)
        effect(table, pool)
        return out

    return fn


def written_around(side: int, value: float) -> Callable[[Tensor, Tensor], Any]:
    def effect(table: Tensor, pool: Tensor) -> None:
        if pool.storage_offset() and pool.shape[0]:
            over_wide(pool)[:, side] = value

    return effect


EFFECTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "written before": (written_around(0, 5), "the memory around its argument pool"),
    "written behind": (written_around(-1, 5), "the memory around its argument pool"),
    "zeros behind": (written_around(-1, 0), "the memory around its argument pool"),
    "gradients switched on": (
        lambda table, pool: table.requires_grad_(),
        "requires_grad of its argument table",
    ),
    "turned": (lambda table, pool: table.t_(), "its argument table"),
    "taken elsewhere": (lambda table, pool: pool.set_(pool.clone()), "its argument pool"),
    "another dtype": (lambda table, pool: setattr(table, "data", table.double()), "its argument table"),
    "cut": (lambda table, pool: pool.resize_(0, pool.shape[1]), "its argument pool"),
    "freed": (lambda table, pool: table.untyped_storage().resize_(0), "its argument table"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_on_arguments_are_found(name: str, unshrunk: None) -> None:
    effect, what = EFFECTS[name]
    assert f"It changed {what}, which must be left as it was." in str(refused(with_effect(effect), form="map"))


def test_gradients_switched_off_are_found(unshrunk: None) -> None:
    def fn(ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor) -> Tensor:
        pool.requires_grad_(False)
        return map_scatter(ids, table, pool, row_map)

    assert "requires_grad of its argument pool" in str(refused(fn, form="map", gradients=True))


def test_nothing_is_around_where_arguments_are_not_strided() -> None:
    assert_scatter_correct(with_effect(written_around(0, 5)), form="map", strided=False, examples=50)


def overlapping(*given: Tensor) -> Tensor:
    out = map_scatter(*given)
    return out[:1].expand_as(out) if len(out) and bool((out == out[:1]).all()) else out


def as_nested(*given: Tensor) -> Tensor:
    out = map_scatter(*given)
    return torch.nested.nested_tensor(list(out)) if len(out) else out


LAYOUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "sparse": (
        lambda *given: map_scatter(*given).to_sparse(),
        "a dense tensor, and gave one of layout sparse_coo",
    ),
    "compressed": (lambda *given: map_scatter(*given).to_sparse_csr(), "gave one of layout sparse_csr"),
    "nested": (as_nested, "gave one of layout nested"),
    "expanded": (
        overlapping,
        "Its result's elements share memory with each other, as after expand(): strides [0, ",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_that_are_not_dense_are_refused(name: str, unshrunk: None) -> None:
    fn, words = LAYOUTS[name]
    assert words in str(refused(fn, form="map"))


def test_dense_results_may_have_any_strides() -> None:
    assert_scatter_correct(lambda *given: map_scatter(*given).t().contiguous().t(), form="map", examples=50)
    assert_scatter_correct(
        lambda *given: torch.cat([map_scatter(*given)] * 2, dim=1)[:, : given[1].shape[1]],
        form="map",
        examples=50,
    )


def features_by_position(embeds: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    padded = torch.cat([features, features.new_zeros(len(mask) - len(features), features.shape[1])])
    return torch.where(mask[:, None], padded.to(embeds.dtype), embeds)


def written_in_place(embeds: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    with torch.no_grad():
        embeds[mask] = features.to(embeds.dtype)
    return embeds.clone()


MASK_FAULTS = {
    "features by position": features_by_position,
    "one feature for all": lambda embeds, mask, features: mask_scatter(
        embeds, mask, features[:1].expand_as(features)
    ),
    "mask shifted": lambda embeds, mask, features: mask_scatter(embeds, mask.roll(1), features),
    "last feature dropped": lambda embeds, mask, features: mask_scatter(
        embeds, mask & (mask.cumsum(0) < mask.sum()), features[:-1]
    ),
    "in place": written_in_place,
    "embeds themselves": lambda embeds, mask, features: (
        embeds if not bool(mask.any()) else mask_scatter(embeds, mask, features)
    ),
    "features' dtype": lambda embeds, mask, features: torch.cat([features, embeds])[: len(mask)],
}


@pytest.mark.parametrize("name", MASK_FAULTS)
def test_faults_of_masks_are_found(name: str, unshrunk: None) -> None:
    refused(MASK_FAULTS[name], form="mask")


class _LastWins(torch.autograd.Function):
    """Rows of a pool; the gradient of a row used twice is the last one's alone."""

    @staticmethod
    def forward(ctx: Any, pool: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = pool.shape
        return pool[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        out = gradient.new_zeros(ctx.shape)
        for row, place in enumerate(index.tolist()):
            out[place] = gradient[row]
        return out, None


def repeated_rows_lost(ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor) -> Tensor:
    covered = row_map >= 0
    out = clamped(ids, table)
    out[covered] = _LastWins.apply(pool, row_map[covered].long()).to(out.dtype)
    return out


def covered_rows_reach_the_table(ids: Tensor, table: Tensor, pool: Tensor, row_map: Tensor) -> Tensor:
    text = clamped(ids, table)
    right = map_scatter(ids, table, pool, row_map)
    return right + (text - text.detach()) * (row_map >= 0).to(text.dtype)[:, None]


GRADIENT_FAULTS = {
    "no gradient": lambda *given: map_scatter(*given).detach(),
    "none to the pool": lambda ids, table, pool, row_map: map_scatter(ids, table, pool.detach(), row_map),
    "none to the table": lambda ids, table, pool, row_map: map_scatter(ids, table.detach(), pool, row_map),
    "repeated rows lost": repeated_rows_lost,
    "covered rows reach the table": covered_rows_reach_the_table,
}


@pytest.mark.parametrize("name", GRADIENT_FAULTS)
def test_faults_of_gradients_are_found_where_gradients_are_checked(name: str, unshrunk: None) -> None:
    assert_scatter_correct(GRADIENT_FAULTS[name], form="map", examples=50)
    assert "gradient" in str(refused(GRADIENT_FAULTS[name], form="map", gradients=True))


def test_a_backward_that_raises_is_told_with_its_cause() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("boom")

    error = refused(lambda *given: Broken.apply(map_scatter(*given)), form="map", gradients=True)
    assert "In the backward it raised ZeroDivisionError: boom" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_options_leave_out_what_they_name(unshrunk: None) -> None:
    assert_scatter_correct(FAULTS["overlaps in reverse"], overlaps=False)
    assert_scatter_correct(FAULTS["needs contiguous tables"], strided=False)
    assert_scatter_correct(FAULTS["cast through float16"], dtypes=[torch.float16])

    def sheltered(ids: Tensor, table: Tensor, sources: list[Tensor], ranges: list[SourceRange]) -> Tensor:
        covered = torch.zeros(len(ids), dtype=torch.bool)
        for r in ranges:
            covered[r.dst_start : r.dst_end + 1] = True
        safe = torch.where(covered, 0, ids)
        return scatter(safe, table, sources, ranges, look_up=lambda ids, table: table[ids.long()])

    assert_scatter_correct(sheltered, outside_ids=False)
    refused(sheltered)


def test_the_message_names_the_row_what_it_should_hold_and_what_it_holds() -> None:
    error = refused(FAULTS["source one too far"])
    assert (
        "With more rows around, the sources look shifted by one: rows hold the source row after the right"
        in str(error)
    )
    assert error.rows == (0,)
    error = refused(FAULTS["source one too early"])
    assert "Row 0 should hold source 0 row 1; it holds source 0 row 0." in str(error)
    assert "\nThe sources look shifted by one: rows hold the source row before the right one." in str(error)
    error = refused(FAULTS["exclusive end"])
    assert "holds the text row of id 0, its own: nothing was put there" in str(error)
    assert "1 of 1 rows are wrong: 0." in str(error)
    assert "With more rows around, the last row of a range is missing, as where an inclusive end is" in str(
        error
    )
    error = refused(FAULTS["destination begins late"])
    assert "With more rows around, the first row of a range is missing" in str(error)
    error = refused(fault(cast=lambda rows, out: torch.zeros(out.shape[1])))
    assert "should hold source 0 row 0; it holds zeros" in str(error)
    error = refused(FAULTS["garbage in uncovered rows"])
    assert "should hold the text row of id 0; it holds NaN" in str(error)
    error = refused(FAULTS["cast through float16"])
    assert "it holds that row changed: column" in str(error)
    error = refused(FAULTS["ids by their remainder"])
    assert "clamped into the vocabulary); it holds the text row of id" in str(error)
    late = fault(change=lambda r: (r.dst_start + 1, r.dst_end + 1, r.src_start))
    assert "source rows lie one row too late" in str(refused(late, overlaps=False, dtypes=[torch.float32]))
    error = refused(MASK_FAULTS["mask shifted"], form="mask")
    assert "features row" in str(error)
    assert "It changed its argument table" in str(refused(FAULTS["table written"]))
    assert "shares memory with its argument source 0" in str(refused(FAULTS["a view of a source"]))
    assert "has dtype torch.float64, not torch.float32" in str(refused(FAULTS["wrong dtype"]))
    assert "gave list" in str(refused(FAULTS["no tensor"]))


def test_the_gradient_s_message_names_the_row_and_its_users() -> None:
    text = str(refused(GRADIENT_FAULTS["covered rows reach the table"], form="map", gradients=True))
    assert "The gradient of the text row of id 0 is" in text
    assert "it is used by no output row" in text
    text = str(refused(GRADIENT_FAULTS["repeated rows lost"], form="map", gradients=True))
    assert "of pool row 0" in text
    assert "it is used by output rows [0, 1], whose gradients add up" in text


@pytest.mark.parametrize(
    "name", ["exclusive end", "cast through float16", "ids not clamped", "overlaps in reverse"]
)
def test_the_code_in_the_message_shows_the_fault_again(name: str) -> None:
    def planted(*given: Any) -> Tensor:
        return FAULTS[name](*given)

    error = refused(planted)
    code = str(error).split("The smallest case found:\n\n")[1]
    names: dict[str, Any] = {"planted": planted}
    if error.__cause__ is not None:
        with pytest.raises(type(error.__cause__)):
            exec(code, names)
        return
    exec(code, names)
    assert names["case"] == error.case
    assert not torch.equal(names["out"], scatter(*error.case.arguments()))


def test_the_case_is_small() -> None:
    case = refused(FAULTS["exclusive end"]).case
    assert case == RangesCase(
        ids=(0,),
        vocabulary=1,
        width=1,
        sources=(1,),
        ranges=(SourceRange(0, 0, 0, 0),),
        source_dtypes=(torch.float32,),
    )
    case = refused(MASK_FAULTS["features by position"], form="mask").case
    assert case == MaskCase(mask=(False, True), width=1)


def test_a_function_that_changes_its_mind_is_told() -> None:
    calls = []

    def moody(*given: Any) -> Tensor:
        calls.append(given)
        return scatter(*given) + (1 if len(calls) == 5 else 0)

    text = str(refused(moody))
    assert "did not fail again on the same case" in text
    assert "race" in text


def test_it_can_stand_inside_a_property_and_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(FAULTS["exclusive end"])
    assert not isinstance(error, HypothesisException)
    assert getattr(error, "__notes__", []) == []
    assert capsys.readouterr().out == ""


def test_the_same_cases_come_every_time_unless_asked_otherwise() -> None:
    def seen(derandomize: bool) -> list[Any]:
        ids = []

        def fn(*given: Any) -> Tensor:
            ids.append((given[0].tolist(), given[3]))
            return scatter(*given)

        assert_scatter_correct(fn, examples=30, derandomize=derandomize)
        return ids

    assert seen(True) == seen(True)
    assert seen(False) != seen(False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "offsets"}, r"form must be one of \['ranges', 'map', 'mask'\], got 'offsets'"),
        ({"examples": 0}, "examples must be a positive integer, such as 200, got 0"),
        ({"dtypes": []}, r"dtypes must be a list of floating-point dtypes.*got \[\]"),
        ({"dtypes": [torch.int32]}, "floating-point dtypes"),
        ({"dtypes": torch.float32}, "floating-point dtypes"),
        ({"device": "xyz"}, r"device must be one on which torch can make tensors here.*got 'xyz': \S"),
        ({"device": "meta"}, "such as 'cpu' or 'cuda:0', got 'meta': Cannot copy"),
        ({"device": "cuda:99"}, "got 'cuda:99': "),
        ({"device": 5}, "got '5': "),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        assert_scatter_correct(scatter, **options)
    with pytest.raises(OptionError, match="fn must be a function of the form's arguments, got int"):
        assert_scatter_correct(3)
