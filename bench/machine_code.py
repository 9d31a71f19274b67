"""Does the assembler make the attention kernel's tensor-core descriptors right? It needs no GPU and times nothing.

ptxas 12.8, which Triton 3.6 brings, can make the upper half of a descriptor of a narrow shared-memory tile from
a register that holds something else, where zero is meant. Keys are then read from other places, other ones each
time, and small tests don't show it (see "Where this differs" in docs/design.md). This compiles the kernel for
sm_90 in many variants and looks for the pattern: an add of a descriptor's constant to a uniform register whose
last definition isn't zero. Exit code 1 says that there is one.

    PYTHONPATH=. python bench/machine_code.py [--all]
"""

import argparse
import importlib
import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmgraph.ops.attention.triton_backend import block_table, padded_width

INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?(?P<name>\S+)\s+(?P<rest>.*?)\s*;")
H200_SHARED_BYTES = 227 * 1024
WIDTHS = ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (80, 40))
ALL_WIDTHS = (
    *((w, w) for w in (16, 32, 37, 40, 48, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256)),
    *((72, 40), (80, 40), (40, 96), (64, 128), (192, 128)),
)


@dataclass(frozen=True)
class Variant:
    width: int
    v_width: int
    max_seqlen: int = 4096
    causal: bool = False
    with_lse: bool = False
    flat: bool = False
    heads_first: bool = False
    heads: int = 16
    group: int = 1


def variants(every: bool) -> list[Variant]:
    kinds: list[dict[str, Any]] = [
        {},
        {"heads_first": True},
        {"heads_first": True, "max_seqlen": 64},
        {"causal": True},
    ]
    if every:
        kinds += [
            {"with_lse": True},
            {"heads_first": True, "with_lse": True, "max_seqlen": 64},
            {"flat": True},
            {"flat": True, "causal": True, "with_lse": True},
            {"heads_first": True, "causal": True, "with_lse": True, "max_seqlen": 64},
        ]
    groups = ((16, 1), (4, 2)) if every else ((16, 1),)
    widths = ALL_WIDTHS if every else WIDTHS
    return [
        Variant(width, v_width, heads=heads, group=group, **kind)
        for (width, v_width), kind, (heads, group) in itertools.product(widths, kinds, groups)
    ]


def wrong_descriptors(listing: str) -> list[str]:
    """The instructions of a disassembly that make a descriptor's upper half from something other than zero."""
    code = [match for line in listing.splitlines() if (match := INSTRUCTION.match(line))]
    found = []
    for place, match in enumerate(code):
        if match["name"] != "UIADD3.X":
            continue
        operands = [part.strip() for part in match["rest"].split(",")]
        constant = next((part for part in operands if re.fullmatch(r"-?0x[0-9a-f]+", part)), None)
        # The two upper bits of a descriptor say how its tile is swizzled, and a tile here always is.
        if constant is None or not (int(constant, 16) & 0xFFFFFFFF) >> 30:
            continue
        for operand in operands[1:]:
            if re.fullmatch(r"UR\d+", operand) and not _is_zero(operand, code[:place]):
                found.append(f"{match['at']}: {match['name']} {match['rest']}")
    return found


def _is_zero(register: str, before: list[re.Match[str]]) -> bool:
    number = int(register[2:])
    for match in reversed(before):
        defined = re.match(r"(?:UP\d+, *)?UR(\d+)", match["rest"])
        if defined is None:
            continue
        first = int(defined[1])
        pair = ".64" in match["name"] or match["name"].endswith(".WIDE")
        if number in range(first, first + (2 if pair else 1)):
            return match["name"] == "UMOV" and match["rest"].replace(" ", "").endswith(",URZ")
    return True


def disassemble(variant: Variant) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = importlib.import_module("mmgraph.ops.attention.triton_kernels").attention_kernel
    blocks = block_table(2, max(variant.width, variant.v_width), variant.max_seqlen, H200_SHARED_BYTES)
    constants = {
        "HEADS": variant.heads,
        "GROUP": variant.group,
        "D": variant.width,
        "DP": padded_width(variant.width),
        "DV": variant.v_width,
        "DVP": padded_width(variant.v_width),
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "CAUSAL": variant.causal,
        "WITH_LSE": variant.with_lse,
        "FLAT": variant.flat,
        "HEADS_FIRST": variant.heads_first,
        "ALIGNED": True,
        "SCALE_FIRST": False,
        "PRECISION": "tf32",
        "FAULT": 0,
    }
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    pointers |= {"lse_ptr": "*fp32" if variant.with_lse else "*bf16", "cu_ptr": "*i32", "flag_ptr": "*i64"}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "scale" else "i32")
        for name in names
    }
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.endswith(("_ptr", "stride"))
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): value for n, value in constants.items()}, divisible
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="360 variants instead of 24; some minutes")
    chosen = variants(parser.parse_args().all)
    wrong, products = 0, 0
    for variant in chosen:
        listing = disassemble(variant)
        products += listing.count("HGMMA")
        for line in wrong_descriptors(listing):
            wrong += 1
            print(f"{variant}\n    {line}")
    print(f"{len(chosen)} variants, {products} tensor-core instructions, {wrong} wrong descriptors")
    if wrong or not products:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
