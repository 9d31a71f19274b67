"""A GPU and packages that aren't there, for tests of what is usable and of what isn't, and why."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import invalidate_caches, metadata
from pathlib import Path

import pytest
import torch

from mmgraph.ops import packages
from mmgraph.ops.attention import cudnn_plans, fa2, fa3, fa4, order, registry, zero_tail

_FAKES = (
    "flash_attn",
    "fa3_fwd_interface",
    "fa3_fwd_config",
    "flash_attn_interface",
    "flash_attn_config",
    "cudnn",
)
_CACHED = (
    fa2._package,
    fa3._build,
    fa4._package,
    zero_tail.triton_package,
    cudnn_plans.package,
    cudnn_plans.compiled,
    cudnn_plans.version,
)


def forget_answers() -> None:
    """Drop what was found out about packages and devices."""
    registry.forget_choices()
    order.forget_choices()
    for one in _CACHED:
        one.cache_clear()


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), hip: str | None = None
) -> None:
    """Answer as on a GPU of that compute capability, an H200 by default, with torch's flash attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Answer that these modules are installed and no others; triton, if among them, can be imported."""
    monkeypatch.setattr(packages, "is_installed", lambda name: name in names)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))


class Folder:
    """A folder of packages, the only one but Python's own that is looked through."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        invalidate_caches()

    def distribution(self, name: str, version: str) -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    @staticmethod
    def forget() -> dict[str, types.ModuleType]:
        """Forget what was imported, here or elsewhere, and what was found out; the modules."""
        forget_answers()
        names = [name for name in sys.modules if name.partition(".")[0] in _FAKES]
        return {name: sys.modules.pop(name) for name in names}

    def find(self, name: str) -> metadata.Distribution:
        for found in metadata.distributions(name=name, path=[str(self.root)]):
            return found
        raise metadata.PackageNotFoundError(name)


@contextmanager
def packages_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder whose packages can be imported; what was imported from it is forgotten afterwards."""
    folder = Folder(root)
    monkeypatch.setattr(sys, "path", [str(root), *(path for path in sys.path if "site-packages" not in path)])
    monkeypatch.setattr(fa4.metadata, "distribution", folder.find)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    folder.write("triton/__init__.py")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module written anew within a second is read anew
    real = folder.forget()
    yield folder
    folder.forget()
    sys.modules.update(real)
