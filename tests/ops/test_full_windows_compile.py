"""Invariant: the Gluon kernel for windows compiles for each GPU that it is for, with copies of 16 bytes."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def machine_code():
    spec = importlib.util.spec_from_file_location("machine_code", BENCH / "machine_code.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["machine_code"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["machine_code"]


@pytest.mark.parametrize(
    ("capability", "widths", "flags"),
    [
        (80, (80, 80), (True, True)),
        (90, (72, 72), (False, False)),
        (100, (64, 128), (False, True)),
        (120, (256, 256), (True, False)),
    ],
)
def test_it_compiles_with_wide_copies(machine_code, capability, widths, flags):
    made = machine_code.compile_for(machine_code.full_window(*widths, 4, 2, *flags), capability)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", made.asm["ptx"])
    assert copies
    assert set(copies) == {"0x10"}
    assert "mma.sync" in made.asm["ptx"]
    assert made.metadata.shared == machine_code.windows.full_window_bytes(*widths)
    # The steps that clear the tail pass 2^31 where there are hundreds of millions of rows.
    block = machine_code.windows.LONGEST
    assert len(re.findall(rf"arith\.muli %\S+, %c{block}_i64\S* : i64", made.asm["ttgir"])) >= 2
    # Behind the last product only rows of the result are written, 16 bytes at a time.
    results = made.asm["ptx"][made.asm["ptx"].rindex("mma.sync") :]
    assert set(re.findall(r"st\.global\.(\S+)", results)) == {"v4.b32"}
