"""The main job, from what was asked for to the report: device, photos, model and requests are chosen here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from mmgraph.serving.errors import DeviceChoiceError, RequestError
from mmgraph.serving.hub_ways import check_compile_backend
from mmgraph.serving.job import Job, Progress, RunSettings, Scale
from mmgraph.serving.model import (
    REAL_LIMITS,
    SMALL_LIMITS,
    image_processor,
    load_checkpoint,
    random_model,
    real_config,
    small_config,
)
from mmgraph.serving.photos import folder_photos, packaged_photos
from mmgraph.serving.report import RunReport
from mmgraph.serving.requests import build_requests, prepare_images

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SMALL = Scale(SMALL_LIMITS, 128, steps=1)
_REAL = Scale(REAL_LIMITS, 2048, steps=4)


def execute(settings: RunSettings, *, progress: Progress | None = None, bars: bool = False) -> RunReport:
    """Do the whole job.

    Args:
        settings: What was asked for.
        progress: Told what is going on.
        bars: Show the capture managers' progress bars.

    Raises:
        ServingError: Something in the settings can't be done; the message says what.
    """
    tell = progress or (lambda _: nullcontext())
    device, dtype = _device(settings.device), settings.dtype
    if dtype is not None and dtype not in DTYPES:
        raise DeviceChoiceError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen = DTYPES[dtype] if dtype else (torch.bfloat16 if device.type == "cuda" else torch.float32)
    _check_numbers(settings)
    small = settings.size == "small" or (settings.size == "auto" and device.type == "cpu")
    scale = _SMALL if small else _REAL
    wanted = max(2, settings.requests)
    with tell("reading photos"):
        photos = folder_photos(settings.images, wanted) if settings.images else packaged_photos(wanted)
    with tell("building the model"):
        if settings.model:
            model = load_checkpoint(settings.model, device=device, dtype=chosen)
            name, weights = str(settings.model), "checkpoint"
        else:
            config = small_config() if small else real_config()
            name = "Qwen3-VL, small configuration" if small else "Qwen3-VL-8B tower, first language layers"
            weights = f"random weights from seed {settings.seed}"
            model = random_model(config, device=device, dtype=chosen, seed=settings.seed)
    with tell("preparing photos"):
        processor = image_processor(model.config, scale.limits, settings.model)
        images = prepare_images(photos, processor, scale.limits)
        requests = build_requests(
            images, model.config, count=settings.requests, budget=scale.budget, seed=settings.seed
        )
    # The small model's products are too small to share: more threads only wait for each other, and where other programs
    # run, up to 20 times longer than the product takes.
    with _intraop_threads(1) if small and device.type == "cpu" else nullcontext():
        return Job(settings, scale, model, requests, tell, bars).report(name, weights)


@contextmanager
def _intraop_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(name: str) -> torch.device:
    there = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if not there:
            raise DeviceChoiceError(
                "--device cuda needs a CUDA device, and torch sees none: use --device cpu or auto"
            )
        return torch.device("cuda", torch.cuda.current_device())
    raise DeviceChoiceError(f"--device must be cpu, cuda or auto, got {name!r}")


def _check_numbers(settings: RunSettings) -> None:
    if settings.requests < 1:
        raise RequestError(f"--requests must be at least 1, got {settings.requests}")
    if settings.decode_steps < 0:
        raise RequestError(f"--decode-steps must be zero or more, got {settings.decode_steps}")
    if settings.passes < 1:
        raise RequestError(f"--passes must be at least 1, got {settings.passes}")
    if settings.compare:
        check_compile_backend(settings.compile_backend)
