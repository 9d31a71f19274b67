"""Invariant: a tower block exports with its ops whole, and runs at other sizes, saved and loaded, and from AOTInductor.

Where something can't work, the test says what is raised instead.
"""

import subprocess
import sys

import pytest
import torch
from torch.export import Dim
from tower_block import (
    SIZES,
    LongestByShape,
    LongestByValue,
    Size,
    TowerBlock,
    assert_right,
    exact_block,
    exactly,
    gradients,
    inputs,
)

from mmgraph import ops

ROWS = {0: Dim.DYNAMIC}
NAN = float("nan")
SMALL = (Size((1,)), Size((1, 1, 1)), Size((), tail=2), Size(()), Size((0, 0), tail=3))


def make_block(backend=None):
    torch.manual_seed(0)
    return TowerBlock(2, 8, backend=backend)


def export_block(block, *, grad=False, strict=False):
    with torch.set_grad_enabled(grad):
        dynamic = (ROWS, ROWS, ROWS, ROWS, Dim.DYNAMIC)
        return torch.export.export(block, inputs(SIZES[0], block), dynamic_shapes=dynamic, strict=strict)


def ops_of(program):
    return [str(node.target).split(".")[1] for node in program.graph.nodes if "mmgraph." in str(node.target)]


def assert_runs_as(run, block, sizes=SIZES, convert=lambda arguments: arguments):
    exact = exact_block(block)
    with torch.no_grad():
        for size in sizes:
            arguments = inputs(size, block, padding=NAN)
            results = run(*convert(arguments)), block(*arguments), exact(*exactly(arguments))
            assert_right(*(out[: sum(size.lengths)] for out in results))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("backend", "grad", "expected"),
    [
        (None, False, ["packed_qkv_rope", "varlen_attention"]),
        ("reference", False, ["packed_qkv_rope", "attn_reference"]),
        (None, True, ["packed_qkv_rope_autograd", "varlen_attention_lse"]),
        ("reference", True, ["packed_qkv_rope_autograd", "varlen_attention_lse"]),
    ],
)
def test_the_program_holds_the_ops_and_runs_at_other_sizes(backend, grad, expected, strict):
    block = make_block(backend)
    program = export_block(block, grad=grad, strict=strict)
    lowered = program.run_decompositions()
    assert ops_of(program) == ops_of(lowered) == expected
    if not strict:
        assert_runs_as(program.module(), block, SIZES + SMALL)
        assert_runs_as(lowered.module(), block)


def test_a_program_exported_with_gradients_trains():
    block = make_block()
    trained, exact = export_block(block, grad=True).module(), exact_block(block)
    for size in SIZES:
        arguments = inputs(size, block)
        eager, expected = gradients(block, block, arguments), gradients(exact, exact, exactly(arguments))
        got = gradients(trained, trained, arguments)
        for name, grad in got.items():
            assert_right(grad, eager[name], expected[name])


def test_a_program_exported_without_gradients_runs_without_them_only():
    block = make_block()
    run = export_block(block).module()
    with pytest.raises(
        ops.GradientError, match=r"exported without gradients must run without: under torch\.no_grad"
    ):
        run(*inputs(SIZES[1], block))
    assert_runs_as(run, block, SIZES[1:2])


def test_a_saved_program_runs_in_this_process(tmp_path):
    block = make_block()
    torch.export.save(export_block(block), tmp_path / "block.pt2")
    program = torch.export.load(tmp_path / "block.pt2")
    assert ops_of(program) == ["packed_qkv_rope", "varlen_attention"]
    assert_runs_as(program.module(), block)


def by_value(arguments):
    return (*arguments[:4], torch.tensor(arguments[4]))


def by_shape(arguments):
    return (*arguments[:4], torch.empty(arguments[4], 0))


def compile_ahead(folder, wrapped, convert, longest):
    with torch.no_grad():
        example = convert(inputs(SIZES[0], wrapped.block))
        program = torch.export.export(wrapped, example, dynamic_shapes=(ROWS, ROWS, ROWS, ROWS, longest))
    return torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "ahead.pt2"))


FRESH = """
import sys, torch
folder, module = sys.argv[1:]
if module:
    __import__(module)
example = torch.load(folder + "/example.pt")
for load, kind in (
    (lambda: torch.export.load(folder + "/block.pt2").module(), "program"),
    (lambda: torch._inductor.aoti_load_package(folder + "/ahead.pt2"), "package"),
):
    try:
        run = load()
    except RuntimeError as error:
        print(kind, "isn't loaded:", str(error).splitlines()[0])
        continue
    with torch.no_grad():
        out = run(*example["arguments"])
    torch.testing.assert_close(out, example["out"])
    print(kind, "is right")
"""


def run_fresh(folder, module):
    command = [sys.executable, "-c", FRESH, str(folder), module]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_aotinductor_and_fresh_processes(tmp_path):
    """One package, which takes seconds to compile, for all that is asked of packages."""
    block = make_block()
    wrapped = LongestByValue(block)
    run = torch._inductor.aoti_load_package(compile_ahead(tmp_path, wrapped, by_value, None))
    assert_runs_as(run, block, SIZES + SMALL, by_value)

    arguments = by_value(inputs(SIZES[1], block))
    with torch.no_grad():
        program = torch.export.export(wrapped, arguments, dynamic_shapes=(ROWS, ROWS, ROWS, ROWS, None))
        torch.export.save(program, tmp_path / "block.pt2")
        torch.save({"arguments": arguments, "out": wrapped(*arguments)}, tmp_path / "example.pt")
    knows = run_fresh(tmp_path, "mmgraph.ops")
    assert knows.stdout.splitlines() == ["program is right", "package is right"], knows.stderr
    doesn_t = run_fresh(tmp_path, "")
    program_line, package_line = doesn_t.stdout.splitlines()
    assert "program isn't loaded: We ran into an error when deserializing" in program_line
    assert "failed to resolve torch.ops.mmgraph.packed_qkv_rope.default" in doesn_t.stderr
    assert "Please import the custom op" in doesn_t.stderr
    assert package_line == "package isn't loaded: Could not find schema for mmgraph::packed_qkv_rope."


def test_an_error_inside_aotinductor_is_an_error_and_says_why(tmp_path, capfd):
    block = make_block()
    run = torch._inductor.aoti_load_package(compile_ahead(tmp_path, LongestByShape(block), by_shape, ROWS))
    wrong = (*by_shape(inputs(SIZES[1], block))[:4], torch.empty(1, 0))
    with pytest.raises(RuntimeError) as caught:  # torch 2.11 prints what was raised, and raises what came of it
        run(*wrong)
    assert (
        "the longest sequence has 16 tokens but max_seqlen is 1" in str(caught.value) + capfd.readouterr().err
    )
    assert_runs_as(run, block, SIZES, by_shape)


def test_aotinductor_takes_no_dynamic_number(tmp_path):
    """It puts None in the place of every input that isn't a tensor: hence ``LongestByValue``."""
    block = make_block()
    with torch.no_grad(), pytest.raises(RuntimeError, match="'max_seqlen' but instead found type 'NoneType'"):
        torch._inductor.aoti_compile_and_package(export_block(block), package_path=str(tmp_path / "number.pt2"))
