"""What this machine has: versions, the GPU, and every attention backend with "usable" or the reason why not."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import mmgraph

if TYPE_CHECKING:
    from rich.console import Console

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "pillow",
    "scikit-image",
    "scikit-learn",
    "flash-attn",
    "fa3-fwd",
    "tokenspeed-fa3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
    "cuda-python",
)


@dataclass(frozen=True)
class BackendState:
    """An attention backend: whether it can be used here, or else the reason."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True)
class Gpu:
    """A CUDA device."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    multiprocessors: int


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `mmgraph doctor` shows.

    Attributes:
        mmgraph: This package's version.
        python: Python's version.
        platform: Operating system and processor.
        packages: Version of each package that matters, or None where it isn't installed.
        cuda: The CUDA version that torch was built for, or None.
        driver: The NVIDIA driver's version, or None.
        gpus: The visible devices.
        backends: Every attention backend.
        choice: How a call that names no attention backend gets one.
    """

    mmgraph: str
    python: str
    platform: str
    packages: dict[str, str | None]
    cuda: str | None
    driver: str | None
    gpus: list[Gpu]
    backends: list[BackendState]
    choice: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain lists and dictionaries, for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this machine. It reads versions and asks each backend; it runs no kernel."""
    import torch

    return Diagnosis(
        mmgraph=mmgraph.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _PACKAGES} | {"torch": torch.__version__},
        cuda=torch.version.cuda,
        driver=_driver(),
        gpus=_gpus(),
        backends=_backends(),
        choice=_choice(),
    )


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the diagnosis as tables.

    Args:
        diagnosis: What `diagnose` returned.
        console: Where to print.
    """
    from rich import box
    from rich.table import Table

    versions = Table(title=f"mmgraph {diagnosis.mmgraph}", box=box.SIMPLE_HEAD, title_justify="left")
    versions.add_column("what")
    versions.add_column("version")
    versions.add_row("python", diagnosis.python)
    versions.add_row("platform", diagnosis.platform)
    for name, version in diagnosis.packages.items():
        versions.add_row(name, version or "[dim]not installed[/dim]")
    versions.add_row("CUDA of torch", diagnosis.cuda or "[dim]none: torch is built for the CPU[/dim]")
    versions.add_row("NVIDIA driver", diagnosis.driver or "[dim]none found[/dim]")
    for gpu in diagnosis.gpus:
        size = f"{gpu.memory_bytes / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors"
        versions.add_row(f"GPU {gpu.index}", f"{gpu.name}, capability {gpu.capability}, {size}")
    if not diagnosis.gpus:
        versions.add_row("GPU", "[dim]none visible[/dim]")
    console.print(versions)

    backends = Table(title="attention backends", box=box.SIMPLE_HEAD, title_justify="left")
    backends.add_column("backend")
    backends.add_column("here")
    for backend in diagnosis.backends:
        backends.add_row(backend.name, "[green]usable[/green]" if backend.usable else backend.reason)
    console.print(backends)
    console.print(f"without a name: {diagnosis.choice}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        gpus.append(
            Gpu(index, p.name, f"{p.major}.{p.minor}", int(p.total_memory), int(p.multi_processor_count))
        )
    return gpus


def _driver() -> str | None:
    """The driver's version as the kernel module reports it; no process is started."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            first = file.readline()
    except OSError:
        return None
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), None)


def _backends() -> list[BackendState]:
    from mmgraph.ops import explain_backends

    return [BackendState(b.name, bool(b.usable), b.reason) for b in explain_backends()]


def _choice() -> str:
    import torch

    from mmgraph.ops import BackendError, select_backend
    from mmgraph.ops.attention import choice_table, settings

    asked, origin = None, ""
    try:
        asked, origin = settings.asked_for()
        if asked is not None:
            if asked != settings.MEASURE:
                select_backend(backend=asked)  # says why where it can't be used here
            return f"{asked}, asked for by {origin}"
        name = select_backend(tokens=16384, batch=4, max_seqlen=4096, heads=16, head_dim=128)
    except BackendError as error:
        return str(error).splitlines()[0] + ("" if asked is None else f" ({asked!r} is asked for by {origin}.)")
    if not torch.cuda.is_available():
        return name
    capability = torch.cuda.get_device_capability()
    how = "measured" if choice_table.load(*capability) else "not measured"
    place = f"capability {capability[0]}.{capability[1]}"
    return f"the fastest by shape, {how} on {place}; for 4 x 4096 rows, 16 heads of 128: {name}"
