"""``assert_scatter_correct``: does a function of yours put multimodal rows in their places?

Promises: every case is compared with the oracle bit for bit, its arguments and the memory around them are checked, and
a failure says which row holds what, with the smallest case found as code. Same code on a CPU and any device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from mmgraph.errors import OptionError
from mmgraph.testing.arguments import Arguments
from mmgraph.testing.cases import ScatterCase
from mmgraph.testing.drawing import FLOATING
from mmgraph.testing.explaining import ScatterMismatch, code_of, describe_wrong, pattern_of, wrong_rows
from mmgraph.testing.options import check_device, check_dtypes
from mmgraph.testing.origins import Origin, SourceRange
from mmgraph.testing.reference import added_gradients
from mmgraph.testing.searching import Failure, find_failure
from mmgraph.testing.strategies import map_cases, mask_cases, range_cases

Form = Literal["ranges", "map", "mask"]

_ARGUMENTS = {
    "ranges": ("input_ids", "table", "sources", "ranges"),
    "map": ("input_ids", "table", "pool", "row_map"),
    "mask": ("embeds", "mask", "features"),
}


def assert_scatter_correct(
    fn: Callable[..., torch.Tensor],
    *,
    form: Form = "ranges",
    examples: int = 200,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = FLOATING,
    gradients: bool = False,
    overlaps: bool = True,
    outside_ids: bool = True,
    strided: bool = True,
    derandomize: bool = True,
) -> None:
    """Check a function that puts multimodal rows over text rows, on many small cases.

    A row that is covered takes its source row, cast to the result's dtype; every other row takes its text row. The
    result must be ``[T, H]``, dense, in the dtype of table or ``embeds``, on their device and in memory of its own, and
    so must each of its elements; the arguments, and matrices that they are columns of, must be left as they were.

    Args:
        fn: Of the form's arguments, all positional:

            - "ranges": ``fn(input_ids, table, sources, ranges)``: ids int32 or int64 ``[T]``, table ``[V, H]``, a list
              of sources ``[n_i, H]``, and a list of `SourceRange`, whose ends are inclusive.
            - "map": ``fn(input_ids, table, pool, row_map)``: pool ``[R, H]``, and int32 ``[T]`` with the pool's row for
              each output row, or -1.
            - "mask": ``fn(embeds, mask, features)``: embeds ``[T, H]``, mask bool ``[T]``, and features ``[n, H]``, one
              for each true entry, in order.
        form: Which.
        examples: How many cases to try.
        device: Where tensors lie.
        dtypes: Floating dtypes of tables and sources, drawn apart.
        gradients: Check the gradients of all floating-point arguments too: table rows get theirs from text rows alone,
            and a source row that is used twice adds up. Exact in every dtype: the gradients are small integers.
        overlaps: Ranges may overlap; the later one wins.
        outside_ids: Ids of text rows may be outside the vocabulary; they are clamped into it. Ids of covered rows
            always may be anything.
        strided: Tensors may be columns of wider matrices.
        derandomize: Try the same cases every time; else new ones.

    Raises:
        ScatterMismatch: The function is wrong; the message has the smallest case found, and ``case`` holds it.
        OptionError: An option is none of its choices.
    """
    where = str(device)
    _check_options(fn, form, dtypes, where)
    failure = find_failure(
        _strategy(form, dtypes, overlaps=overlaps, outside_ids=outside_ids, strided=strided),
        lambda case: _failure(fn, case, form, where, gradients),
        examples=examples,
        derandomize=derandomize,
    )
    if failure is not None:
        if failure.rows and not failure.hint:
            failure = replace(failure, hint=_larger_hint(fn, failure.case, form, where))
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ScatterMismatch(
            f"{name} is no right scatter of form {form!r}.\n{failure.words}{failure.notes()}\n\n"
            f"The smallest case found:\n\n{code_of(failure.case, fn, where)}",
            case=failure.case,
            rows=failure.rows,
        ) from failure.cause


def _check_options(fn: Any, form: Any, dtypes: Any, device: str) -> None:
    if not callable(fn):
        raise OptionError(f"fn must be a function of the form's arguments, got {type(fn).__name__}")
    if form not in _ARGUMENTS:
        raise OptionError(f"form must be one of {list(_ARGUMENTS)}, got {form!r}")
    check_dtypes({"dtypes": dtypes})
    check_device(device)


def _strategy(
    form: Form, dtypes: Sequence[torch.dtype], *, overlaps: bool, outside_ids: bool, strided: bool
) -> st.SearchStrategy[Any]:
    if form == "ranges":
        return range_cases(overlaps=overlaps, outside_ids=outside_ids, strided=strided, dtypes=dtypes)
    if form == "map":
        return map_cases(outside_ids=outside_ids, strided=strided, dtypes=dtypes)
    return mask_cases(strided=strided, dtypes=dtypes)


def _failure(
    fn: Callable[..., torch.Tensor], case: ScatterCase, form: Form, device: str, gradients: bool
) -> Failure | None:
    arguments = case.arguments(device)
    tensors = [tensor for group in case.inputs(arguments).values() for tensor in group]
    if gradients:
        for tensor in tensors:
            tensor.requires_grad_()
    before = Arguments(_flat(arguments, form))
    out: Any = None
    host: Any = None
    try:
        out = fn(*arguments)
        words = _metadata(case, arguments, out)
        host = out.detach().cpu() if words is None else None  # where a device says what went wrong there
    except Exception as error:
        return _raised(case, error)
    words = words or before.changed(_flat(arguments, form)) or before.shared(out)
    if words is not None:
        return Failure(case, words)
    wrong = wrong_rows(case, host)
    if wrong:
        rows = tuple(entry.row for entry in wrong)
        hint = pattern_of(case, wrong)
        return Failure(case, describe_wrong(case, wrong), rows, hint=hint and f"The {hint}.")
    if not gradients or not case.origins():
        return None
    if not out.requires_grad:
        return Failure(
            case, f"Its result has no gradient, though {', '.join(case.inputs(arguments))} rows need one."
        )
    places = torch.arange(len(case.origins())).unsqueeze(1)
    gradient = (1 + (places + torch.arange(case.width)) % 7).to(out.device, out.dtype)
    try:
        got = torch.autograd.grad(out, tensors, gradient, allow_unused=True)
    except Exception as error:
        return _raised(case, error, "In the backward it")
    words = _wrong_gradient(case, arguments, gradient, got)
    return None if words is None else Failure(case, words)


def _larger_hint(fn: Callable[..., torch.Tensor], case: Any, form: Form, device: str) -> str:
    """Say what a case with room on all sides looks like: the smallest one has none to show a shift."""
    changes: dict[str, Any] = {"width": 2}
    if form == "ranges":
        changes |= {"ranges": (SourceRange(3, 5, 0, 2),), "sources": (7,), "source_dtypes": (case.dtype,)}
    elif form == "map":
        changes |= {"row_map": (-1, -1, -1, 2, 3, 4, -1, -1, -1), "pool": 7}
    else:
        changes |= {"mask": (False, False, False, True, True, True, False, False, False)}
    if form != "mask":
        changes |= {"ids": tuple(range(9)), "vocabulary": 9}
    found = _failure(fn, replace(case, **changes), form, device, False)
    return f"With more rows around, the {found.hint[4:]}" if found is not None and found.hint else ""


def _raised(case: ScatterCase, error: Exception, who: str = "It") -> Failure:
    return Failure(case, f"{who} raised {type(error).__name__}: {error}", cause=error)


def _metadata(case: ScatterCase, arguments: tuple[Any, ...], out: Any) -> str | None:
    if not isinstance(out, torch.Tensor):
        return f"It must give a tensor, and gave {type(out).__name__}."
    if out.layout != torch.strided or out.is_nested:
        kind = "nested" if out.is_nested else str(out.layout).removeprefix("torch.")
        return f"It must give a dense tensor, and gave one of layout {kind}."
    expected = ([len(case.origins()), case.width], case.dtype, arguments[0].device)
    came = (list(out.shape), out.dtype, out.device)
    names = ("shape", "dtype", "device")
    wrong = [
        f"{name} {got}, not {right}"
        for name, got, right in zip(names, came, expected, strict=True)
        if got != right
    ]
    return f"Its result has {' and '.join(wrong)}." if wrong else None


def _flat(arguments: tuple[Any, ...], form: Form) -> list[tuple[str, Any]]:
    """Name the arguments, and the entries of the list of sources."""
    named: list[tuple[str, Any]] = []
    for name, value in zip(_ARGUMENTS[form], arguments, strict=True):
        if name == "sources":
            named += [(f"source {index}", source) for index, source in enumerate(value)]
        else:
            named.append((name, value))
    return named


def _wrong_gradient(
    case: ScatterCase,
    arguments: tuple[Any, ...],
    gradient: torch.Tensor,
    came: Sequence[torch.Tensor | None],
) -> str | None:
    origins = case.origins()
    expected = added_gradients(origins, gradient, case.inputs(arguments))
    named = [(kind, index, right) for kind, sums in expected.items() for index, right in enumerate(sums)]
    for (kind, index, right), got in zip(named, came, strict=True):
        dense = torch.zeros_like(right) if got is None else got.to_dense().double()
        for row in range(right.shape[0]):
            if torch.equal(dense[row], right[row]):
                continue
            origin = Origin(kind, row, index)  # type: ignore[arg-type]
            users = [place for place, used in enumerate(origins) if used == origin]
            whose = f"by output rows {users}, whose gradients add up" if users else "by no output row"
            return (
                f"The gradient of {origin} is {dense[row].tolist()} and not {right[row].tolist()}: "
                f"it is used {whose}."
            )
    return None
