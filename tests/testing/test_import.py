"""Invariant: only ``mmgraph.testing`` needs hypothesis, and without it says which extra brings it."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


BLOCKED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Finder())
try:
    import mmgraph.testing
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_missing_hypothesis_names_the_extra() -> None:
    assert run(BLOCKED.format(missing="hypothesis")) == (
        "ImportError mmgraph.testing needs hypothesis, which isn't installed; install it with: "
        "pip install 'mmgraph[testing]'"
    )


def test_what_hypothesis_misses_is_its_own_error() -> None:
    shown = run(BLOCKED.format(missing="sortedcontainers"))
    assert shown == "ModuleNotFoundError No module named 'sortedcontainers'"


def test_the_library_imports_no_hypothesis() -> None:
    code = "import sys, mmgraph, mmgraph.embedder, mmgraph.ops, mmgraph.capture; print('hypothesis' in sys.modules)"
    assert run(code) == "False"


def test_the_names_of_the_package() -> None:
    code = (
        "from mmgraph.testing import strategies, reference, assert_scatter_correct; import mmgraph.testing as t; "
        "print(all(hasattr(t, name) for name in t.__all__), all(hasattr(strategies, n) for n in strategies.__all__), "
        "all(hasattr(reference, n) for n in reference.__all__))"
    )
    assert run(code) == "True True True"
