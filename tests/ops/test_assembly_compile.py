"""Invariant: the assembly kernels compile for each GPU, with loads of 16 bytes in flight together, and 64-bit offsets.

Compiled here without a GPU; what they do there is in tests/gpu.
"""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmgraph.ops.assembly import backward_kernels, kernels
from mmgraph.ops.assembly.cuda import shape_of

WIDTH = 4096


def constants_of(kernel, table, pool, changed):
    """Signature, constants and aligned arguments of a kernel, for a width of 4096 and aligned strides."""
    shape = shape_of(WIDTH, 4 if table == "fp32" else 2)
    values = {
        "WIDTH": WIDTH,
        "BLOCK": shape.block,
        "PARTS": shape.parts,
        "STRIDE": 64,
        "KINDS": 1,
        "ALIGNMENT": 16,
        "STRICT": False,
        "IN_PLACE": False,
        "NEED_TABLE": True,
        "NEED_POOL": True,
        "SKIPPED": 2**31 - 1,
        "CHUNK": 64,
        **changed,
    }
    kinds = {
        "ids_ptr": "*i64",
        "map_ptr": "*i32",
        "mask_ptr": "*i1",
        "count_ptr": "*i32",
        "places_ptr": "*i32",
        "flag_ptr": "*i64",
        "keys_ptr": "*i32",
        "order_ptr": "*i64",
        "ranges_ptr": "*i32",
        "lists_ptr": "*i64",
        "scratch_ptr": "*fp32",
    }
    of_pool = ("pool_ptr", "features_ptr", "first_ptr", "second_ptr", "third_ptr", "fourth_ptr", "rows_ptr")
    kinds |= dict.fromkeys(of_pool, f"*{pool}")
    if values["KINDS"] > 1:
        kinds |= {"second_ptr": "*fp32", "third_ptr": "*fp16", "fourth_ptr": "*fp64"}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            constants[(index,)] = values.get(name, 1)
        elif name.endswith("_ptr"):
            signature[name] = kinds.get(name, f"*{table}")
        else:
            signature[name] = "i32"
        if name.endswith(("_ptr", "_stride")):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned, shape


def compiled(kernel, capability=90, table="bf16", pool="bf16", values=None):
    signature, constants, aligned, shape = constants_of(kernel, table, pool, values or {})
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": shape.warps}
    ).asm


MOVING = (
    "assemble_kernel",
    "ranged_kernel",
    "gather_kernel",
    "merge_kernel",
    "deepstack_kernel",
    "store_kernel",
)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", MOVING)
def test_rows_are_moved_in_wide_pieces(name, capability):
    ptx = compiled(getattr(kernels, name), capability)["ptx"]
    shape = shape_of(WIDTH, 2)
    pieces = shape.block * 2 // (16 * 32 * shape.warps)
    wide = re.findall(r"ld\.global\S*v4\.b32", ptx)
    assert len(wide) == pieces * (2 if name == "deepstack_kernel" else 1)
    stores = re.findall(r"st\.global\S*v4\.b32", ptx)
    assert len(stores) == pieces
    # All loads before the first store: as many are in flight.
    assert max(m.start() for m in re.finditer(r"ld\.global\S*v4\.b32", ptx)) < min(
        m.start() for m in re.finditer(r"st\.global\S*v4\.b32", ptx)
    )


@pytest.mark.parametrize(("table", "pool"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
@pytest.mark.parametrize("name", MOVING)
def test_casting_kernels_compile(name, table, pool):
    assert "st.global" in compiled(getattr(kernels, name), table=table, pool=pool)["ptx"]


@pytest.mark.parametrize(("table", "pool"), [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp64")])
@pytest.mark.parametrize("name", ["keys_kernel", "sum_kernel", "join_kernel", "unmerge_kernel"])
def test_the_gradients_kernels_compile(name, table, pool):
    assert "st.global" in compiled(getattr(backward_kernels, name), table=table, pool=pool)["ptx"]


def test_a_list_of_four_dtypes_compiles():
    assert "st.global" in compiled(kernels.gather_kernel, values={"KINDS": 4})["ptx"]


@pytest.mark.parametrize("name", MOVING)
def test_row_offsets_are_of_64_bits(name):
    ttir = compiled(getattr(kernels, name))["ttir"]
    products = re.findall(r"arith\.muli %\S+, %\S+ : (i64|i32)", ttir)
    assert products.count("i64") >= 2
    # In 32 bits: the piece's first column, and places in the index of ranges.
    assert products.count("i32") <= (5 if name in ("ranged_kernel", "gather_kernel") else 1)
