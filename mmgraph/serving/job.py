"""One run of the main job: its passes in the order in which they must come, and what they show.

First eager, to warm up and choose the tokens; then the reference in a wider dtype, while no graph holds an address of a
weight; then eager and captured, timed, on the same tokens. `--compare` comes before all of them, for the same reason.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import mmgraph
from mmgraph.capture import CaptureManager
from mmgraph.ops import check_errors, select_backend
from mmgraph.serving.compare import RULE, WIDER, compare_tokens, difference
from mmgraph.serving.grids import decode_grid, prefill_grid, tower_grid
from mmgraph.serving.hub_compare import Comparison
from mmgraph.serving.hub_loop import HubPass
from mmgraph.serving.hub_ways import INDUCTOR, compare_ways, loop_way
from mmgraph.serving.loop import PHASES, Functions, PassResult, ServingLoop
from mmgraph.serving.model import ImageLimits, raised_precision
from mmgraph.serving.report import GraphUse, Memory, PhaseTime, RunReport
from mmgraph.serving.requests import Request

Progress = Callable[[str], AbstractContextManager[Any]]
"""Called with what is being done; the block it returns is the doing."""


@dataclass(frozen=True)
class RunSettings:
    """What ``mmgraph run`` was asked for.

    Attributes:
        requests: How many, at least 1.
        seed: Decides weights and prompts.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA where there is a device.
        dtype: ``float32``, ``bfloat16``, ``float16``, or None: bfloat16 on CUDA, float32 on a CPU.
        images: A folder with photos, or None: those in the installed wheels.
        model: A checkpoint folder, or None: random weights.
        size: Random weights' configuration: ``small``, ``real`` or ``auto``: real on CUDA.
        decode_steps: Greedy steps, zero or more.
        passes: Timed passes, at least 1.
        compare: Serve the requests by transformers' own calls too: as it is, compiled, and accelerated.
        compile_backend: torch.compile's backend for that.
    """

    requests: int = 6
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None
    images: Path | None = None
    model: Path | None = None
    size: Literal["auto", "small", "real"] = "auto"
    decode_steps: int = 4
    passes: int = 3
    compare: bool = False
    compile_backend: str = INDUCTOR


@dataclass(frozen=True)
class Scale:
    """What depends on the machine: image sizes, the prefill budget, and how finely buckets are spaced.

    Attributes:
        limits: Pixels of an image.
        budget: Tokens of a prefill step.
        steps: Bucket sizes to a doubling. A recording on a CPU takes seconds a bucket, a graph a fraction of one.
    """

    limits: ImageLimits
    budget: int
    steps: int


class Job:
    """One job: its passes in the order in which they must come."""

    def __init__(
        self,
        settings: RunSettings,
        scale: Scale,
        model: Any,
        requests: list[Request],
        tell: Progress,
        bars: bool,
    ) -> None:
        self.settings = settings
        self.scale = scale
        self.model = model
        self.requests = requests
        self.tell = tell
        self.bars = bars
        self.device: torch.device = model.lm_head.weight.device
        self.dtype: torch.dtype = model.lm_head.weight.dtype
        self.loop = ServingLoop(model, requests, budget=scale.budget, decode_steps=settings.decode_steps)

    def report(self, name: str, weights: str) -> RunReport:
        """Run every pass and put the findings together."""
        compared = self._compare() if self.settings.compare else None
        with self.tell("eager pass, warming up"):
            tokens = self.loop.run(self.loop.eager()).tokens
        # Before any capture: the weights move while they are wider.
        with self.tell(f"reference pass in {_name(WIDER[self.dtype])}"):
            reference = self._reference(tokens)
        with self.tell("eager passes, timed"):
            eager, eager_times, _, peak_eager = self._timed(self.loop.eager(), tokens)
        graphs, seconds = self._capture()
        plain: Callable[..., Any] = self.loop.language.decode
        captured_functions = Functions(graphs["tower"], graphs["prefill"], graphs.get("decode", plain))
        with self.tell("captured passes"):
            captured, captured_times, first, peak_captured = self._timed(captured_functions, tokens)
        comparison = None
        if compared is not None:
            comparison, hub = compared
            first += sum(seconds.values())
            row = loop_way(comparison.ways[0], hub, tokens, captured, captured_times, first=first)
            comparison = comparison.with_way(row)
        uses = [
            GraphUse.from_report(n, g.report(), seconds=seconds[n], passes=self.settings.passes + 1)
            for n, g in graphs.items()
        ]
        differences = [
            difference("embeddings", eager.embeds, captured.embeds, reference.embeds),
            difference("deepstack rows", eager.deep, captured.deep, reference.deep),
            difference("logits", [eager.logits], [captured.logits], [reference.logits]),
        ]
        flat = (-1, eager.logits.shape[-1])
        config = self.model.config
        return RunReport(
            environment=self._environment(),
            model={
                "name": name,
                "weights": weights,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "vision_layers": config.vision_config.depth,
                "text_layers": config.text_config.num_hidden_layers,
                "hidden": config.text_config.hidden_size,
            },
            requests=[self._describe(number) for number in range(len(self.requests))],
            settings={
                "seed": self.settings.seed,
                "budget": self.scale.budget,
                "decode_steps": self.settings.decode_steps,
                "passes": self.settings.passes,
            },
            images_used=captured.images_used,
            images_encoded=captured.images_encoded,
            phases=[PhaseTime(phase, eager_times[phase], captured_times[phase]) for phase in PHASES],
            graphs=uses,
            memory=Memory(
                weights=sum(p.numel() * p.element_size() for p in self.model.parameters()),
                cache=self.loop.cache.nbytes,
                static=sum(use.report.static_bytes for use in uses),
                pool=sum(use.report.pool_bytes for use in uses),
                peak_eager=peak_eager,
                peak_captured=peak_captured,
            ),
            tolerance_rule=RULE.format(wider=_name(WIDER[self.dtype]), own=_name(self.dtype)),
            differences=differences,
            tokens=compare_tokens(
                eager.logits.reshape(flat), captured.logits.reshape(flat), differences[-1].allowed
            ),
            token_ids=eager.tokens.T.tolist(),
            notes=self._notes(),
            compare=comparison,
        )

    def _compare(self) -> tuple[Comparison, HubPass]:
        return compare_ways(
            self.model,
            self.requests,
            decode_steps=self.settings.decode_steps,
            passes=self.settings.passes,
            tell=self.tell,
            compile_backend=self.settings.compile_backend,
        )

    def _reference(self, tokens: Tensor) -> PassResult:
        wider = WIDER[self.dtype]
        with raised_precision(self.model, wider):
            loop = ServingLoop(
                self.model,
                self.requests,
                budget=self.scale.budget,
                decode_steps=self.settings.decode_steps,
                backend="reference",
            )
            return loop.run(loop.eager(), forced=tokens)

    def _timed(
        self, functions: Functions, tokens: Tensor
    ) -> tuple[PassResult, dict[str, float], float, int | None]:
        """The last pass's result, the median time of each phase, the first pass's time, and the peak memory.

        The first pass counts for none of the medians.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        begin, *results = [self.loop.run(functions, forced=tokens) for _ in range(self.settings.passes + 1)]
        check_errors(self.device)
        times = {phase: statistics.median(r.seconds[phase] for r in results) for phase in PHASES}
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
        return results[-1], times, sum(begin.seconds.values()), peak

    def _capture(self) -> tuple[dict[str, CaptureManager], dict[str, float]]:
        """Capture every bucket of the three functions; decode is left out where there are no decode steps."""
        vision = self.model.config.vision_config
        grids = {
            "tower": tower_grid(
                budget=self.scale.budget,
                limits=self.scale.limits,
                patch=vision.patch_size,
                merge=vision.spatial_merge_size,
                steps=self.scale.steps,
            ),
            "prefill": prefill_grid(
                budget=self.scale.budget,
                longest=max(len(r.ids) for r in self.requests),
                steps=self.scale.steps,
            ),
            "decode": decode_grid(requests=len(self.requests)),
        }
        make = {
            "tower": self.loop.tower.manager,
            "prefill": self.loop.language.prefill_manager,
            "decode": self.loop.language.decode_manager,
        }
        examples = self.loop.examples()
        graphs: dict[str, CaptureManager] = {}
        seconds: dict[str, float] = {}
        for name, grid in grids.items():
            if name == "decode" and not self.settings.decode_steps:
                continue
            start = time.perf_counter()
            with self.tell(f"capturing {name}: {len(grid)} buckets"):
                graphs[name] = make[name](grid).precompile(examples[name], progress=self.bars)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds[name] = time.perf_counter() - start
        return graphs, seconds

    def _environment(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        vision = self.model.config.vision_config
        patches = self.scale.limits.max_pixels // vision.patch_size**2
        attention = select_backend(
            device=self.device,
            dtype=self.dtype,
            head_dim=vision.hidden_size // vision.num_heads,
            heads=vision.num_heads,
            tokens=patches,
            max_seqlen=patches,
        )
        return {
            "mmgraph": mmgraph.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "device": self.device.type,
            "device_name": torch.cuda.get_device_name(self.device) if cuda else f"CPU ({platform.machine()})",
            "threads": torch.get_num_threads(),
            "dtype": _name(self.dtype),
            "attention": attention,
        }

    def _describe(self, number: int) -> dict[str, Any]:
        request = self.requests[number]
        chunks = [c for step in self.loop.schedule for c in step if c.request == number]
        return {
            "kind": request.kind,
            "tokens": len(request.ids),
            "images": [
                {"name": i.name, "source": i.source, "grid": list(i.grid), "tokens": i.tokens, "first": start}
                for start, i in request.images
            ],
            "chunks": [c.count for c in chunks],
        }

    def _notes(self) -> list[str]:
        notes = [
            "Both passes decode with the eager pass's tokens, so that every step compares the same inputs."
        ]
        if self.device.type == "cpu":
            notes.append(
                "On a CPU, graphs are recorded and run again operation by operation: that checks correctness (stale "
                "buffers, padding, lifetimes) and is slower than eager. Speed shows on a GPU only."
            )
        return notes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
