"""Does the assembler make the attention kernels' tensor-core descriptors right? It needs no GPU and times nothing.

ptxas 12.8, which Triton 3.6 brings, can make the upper half of a descriptor of a narrow shared-memory tile from
a register that holds something else, where zero is meant. Keys are then read from other places, other ones each
time, and small tests don't show it (see "Where this differs" in docs/design.md). This compiles the kernels for
sm_90 in many variants and looks for the pattern: an add of a descriptor's constant to a uniform register whose
last definition isn't zero. Exit code 1 says that there is one. Only the instructions of warp groups (HGMMA) have
descriptors; those of single warps (HMMA) have none, and can't go wrong this way.

    PYTHONPATH=. python bench/machine_code.py [--all]
"""

import argparse
import importlib
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmgraph.ops.attention import windows, zero_tail
from mmgraph.ops.attention.triton_backend import block_table
from mmgraph.ops.attention.windows import split_width, window_blocks
from mmgraph.ops.attention.zero_tail import padded_power

INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?(?P<name>\S+)\s+(?P<rest>.*?)\s*;")
INSTRUCTIONS = re.compile(r"\b(HGMMA|HMMA)\.")
H200_SHARED_BYTES = 227 * 1024
WIDTHS = ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (80, 40))
ALL_WIDTHS = (
    *((w, w) for w in (16, 32, 37, 40, 48, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256)),
    *((72, 40), (80, 40), (40, 96), (64, 128), (192, 128)),
)
# Every way of cutting a width (see split_width), whole and masked, and some with another width of v.
WINDOW_WIDTHS = (
    *((w, w) for w in (5, 16, 24, 32, 37, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 128, 136, 144, 150, 160)),
    *((w, w) for w in (176, 192, 208, 224, 256)),
    *((72, 40), (80, 64), (64, 80), (64, 128), (128, 256), (16, 192)),
)
# Those that the backends with kernels of one width give, and v's own widths.
TAIL_WIDTHS = (
    *((w, w) for w in (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256)),
    *((40, 37), (72, 40), (128, 16), (192, 128)),
)


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    Attributes:
        kernel: Module below ``mmgraph.ops.attention``, and the kernel's name in it.
        about: What it is for, in words.
        constants: Values of its compile-time constants.
        warps: Warps of a program.
        stages: Stages of pipelined loops.
    """

    kernel: tuple[str, str]
    about: str
    constants: dict[str, Any]
    warps: int
    stages: int


def attention(width: int, v_width: int, heads: int, group: int, kind: dict[str, Any]) -> Variant:
    blocks = block_table(2, max(width, v_width), H200_SHARED_BYTES)
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "D": width,
        "DP": padded_power(width),
        "DV": v_width,
        "DVP": padded_power(v_width),
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "CAUSAL": kind.get("causal", False),
        "WITH_LSE": kind.get("with_lse", False),
        "FLAT": kind.get("flat", False),
        "HEADS_FIRST": kind.get("heads_first", False),
        "ALIGNED": True,
        "SCALE_FIRST": False,
        "PRECISION": "tf32",
        "FAULT": 0,
    }
    about = f"widths {width}, {v_width}; {heads} heads in groups of {group}; {kind}"
    return Variant(("triton_kernels", "attention_kernel"), about, constants, blocks.warps, blocks.stages)


def window(
    width: int, v_width: int, heads: int, group: int, causal: bool, with_lse: bool, batch: int
) -> Variant:
    blocks = window_blocks(2, width, v_width, 4096, batch, heads, H200_SHARED_BYTES)
    first, rest = split_width(width)
    v_first, v_rest = split_width(v_width)
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "D": width,
        "D1": first,
        "D2": rest,
        "DV": v_width,
        "DV1": v_first,
        "DV2": v_rest,
        "WINDOW": windows.LONGEST,
        "BLOCK": blocks.rows,
        "PACKED": blocks.packed,
        "PARTS": blocks.parts,
        "STAGES": blocks.stages,
        "PROBES": windows._PROBES,
        "CHUNK": windows._CHUNK,
        "CAUSAL": causal,
        "WITH_LSE": with_lse,
        "ALIGNED": width % 8 == v_width % 8 == 0,
        "SCALE_FIRST": False,
        "PRECISION": "tf32",
        "FAULT": 0,
    }
    about = f"widths {width}, {v_width}; {heads} heads in groups of {group}; causal {causal}, lse {with_lse}"
    about += f", packed {blocks.packed}"
    return Variant(("window_kernels", "window_kernel"), about, constants, blocks.warps, 1)


def full_window(width: int, v_width: int, heads: int, group: int, causal: bool, with_lse: bool) -> Variant:
    first, rest = split_width(width)
    v_first, v_rest = split_width(v_width)
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "D": width,
        "D1": first,
        "D2": rest,
        "DV": v_width,
        "DV1": v_first,
        "DV2": v_rest,
        "BLOCK": windows.LONGEST,
        "CAUSAL": causal,
        "WITH_LSE": with_lse,
        "SCALE_FIRST": False,
        "WARPS": windows._WARPS,
        "FAULT": 0,
    }
    about = f"widths {width}, {v_width}; {heads} heads in groups of {group}; causal {causal}, lse {with_lse}"
    return Variant(("full_window_kernels", "full_window_kernel"), about, constants, windows._WARPS, 1)


def tail(width: int, v_width: int, heads: int, group: int, causal: bool) -> Variant:
    constants = {
        "PARTS": 8,
        "HEADS": heads,
        "GROUP": group,
        "D": width,
        "DP": padded_power(width),
        "DV": v_width,
        "DVP": padded_power(v_width),
        "BLOCK": 2048,
        "OVERHANG": zero_tail._OVERHANG,
        "ROWS": 64,
        "CAUSAL": causal,
        "FAULT": 0,
    }
    about = f"widths {width}, {v_width}; {heads} heads in groups of {group}; causal {causal}"
    return Variant(("tail_kernels", "close_tail_kernel"), about, constants, 4, 1)


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
    of_attention = [
        attention(width, v_width, heads, group, kind)
        for (width, v_width), kind, (heads, group) in itertools.product(widths, kinds, groups)
    ]
    flags = ((False, False), (True, True))
    of_windows = [
        window(width, v_width, heads, group, causal, with_lse, batch)
        for (width, v_width), (heads, group), (causal, with_lse), batch in itertools.product(
            WINDOW_WIDTHS, groups, flags if every else flags[:1], (64, 1024)
        )
    ]
    of_full_windows = [
        full_window(width, v_width, heads, group, causal, with_lse)
        for (width, v_width), (heads, group), (causal, with_lse) in itertools.product(
            WINDOW_WIDTHS, groups, flags if every else flags[:1]
        )
        if width % 8 == v_width % 8 == 0
    ]
    of_tails = [
        tail(*pair, *heads, causal)
        for pair, heads, causal in itertools.product(TAIL_WIDTHS, groups, (False, True) if every else (False,))
    ]
    return of_attention + of_windows + of_full_windows + of_tails


def wrong_descriptors(listing: str) -> list[str]:
    """The instructions of a disassembly that make a descriptor's upper half from something other than zero."""
    code = [match for line in listing.splitlines() if (match := INSTRUCTION.match(line))]
    found = []
    for place, match in enumerate(code):
        if match["name"] != "UIADD3.X":
            continue
        operands = [part.strip() for part in match["rest"].split(",")]
        constant = next((part for part in operands if re.fullmatch(r"-?0x[0-9a-f]+", part)), None)
        # The two upper bits of a descriptor say how its tile is swizzled, and a tile here always is. The 16 below them
        # are zero, which tells one from the upper half of a small negative number that is added to an address.
        if constant is None or not (bits := int(constant, 16) & 0xFFFFFFFF) >> 30 or bits & 0x3FFFC000:
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


def compile_for(variant: Variant, capability: int) -> Any:
    """The variant, compiled for a compute capability (90 is 9.0), with bfloat16 tensors in aligned memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = variant.kernel
    kernel = getattr(importlib.import_module(f"mmgraph.ops.attention.{module}"), name)
    constants = variant.constants
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    lse = "*fp32" if constants.get("WITH_LSE") else "*bf16"
    pointers |= {"lse_ptr": lse, "cu_ptr": "*i32", "flag_ptr": "*i64"}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "scale" else "i32")
        for name in names
    }
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.endswith("_ptr") or (name.endswith("stride") and constants["D"] % 8 == constants["DV"] % 8 == 0)
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, signature, {(names.index(n),): value for n, value in constants.items()}, divisible
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def disassemble(variant: Variant) -> str:
    import triton

    made = compile_for(variant, 90)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="ten times as many variants; some minutes")
    parser.add_argument("--kernel", help="only the variants of this kernel")
    arguments = parser.parse_args()
    chosen = [v for v in variants(arguments.all) if arguments.kernel in (None, v.kernel[1])]
    counts: dict[tuple[str, int], Counter[str]] = {}
    wrong = 0
    for variant in chosen:
        listing = disassemble(variant)
        count = counts.setdefault((variant.kernel[1], variant.warps), Counter())
        count["variants"] += 1
        count.update(INSTRUCTIONS.findall(listing))
        for line in wrong_descriptors(listing):
            wrong += 1
            print(f"{variant.kernel[1]}, {variant.about}\n    {line}")
    for (name, warps), count in counts.items():
        print(
            f"{name}, {warps} warps: {count['variants']} variants, {count['HGMMA']} HGMMA, {count['HMMA']} HMMA"
        )
    print(f"{len(chosen)} variants, {wrong} wrong descriptors")
    if wrong or not all(count["HGMMA"] + count["HMMA"] for count in counts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
