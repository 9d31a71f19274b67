"""``mmgraph run --compare``: the same requests by transformers as it is, compiled, and accelerated by mmgraph.

Each way changes the model in place and puts it back, so that all of them, and whatever runs later, have the same
weights. They run one after the other, before the loop captures anything: the pass in the wider dtype moves the weights,
which graphs must not see, and no graph of another way takes memory while one is timed.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from mmgraph.ops import check_errors
from mmgraph.serving.compare import WIDER, compare_tokens
from mmgraph.serving.errors import RequestError
from mmgraph.serving.hub_compare import Comparison, Passes, Way, judge, rule
from mmgraph.serving.hub_loop import HUB_PHASES, HubLoop, HubPass
from mmgraph.serving.loop import PassResult
from mmgraph.serving.model import raised_precision
from mmgraph.serving.requests import Request

TRANSFORMERS, COMPILED, ACCELERATED, LOOP = "transformers", "torch.compile", "mmgraph", "mmgraph loop"
"""The names of the ways."""

INDUCTOR = "inductor"
"""torch.compile's own backend."""

Details = Callable[[int], str]
"""Says how a way served, once it has; given how many images that were."""


def check_compile_backend(name: str) -> None:
    """Refuse a backend that torch.compile hasn't got, before the work is done.

    Args:
        name: The backend.

    Raises:
        RequestError: There is no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise RequestError(f"--compile-backend must be one of {', '.join(known)}, got {name!r}")


def compare_ways(
    model: Any,
    requests: Sequence[Request],
    *,
    decode_steps: int,
    passes: int,
    tell: Callable[[str], AbstractContextManager[Any]],
    compile_backend: str = INDUCTOR,
    **options: Any,
) -> tuple[Comparison, HubPass]:
    """Serve the requests in every way, and compare with transformers as it is.

    Args:
        model: transformers' ``Qwen3VLForConditionalGeneration``. Afterwards it is as before.
        requests: At least one.
        decode_steps: Greedy steps after each prompt, zero or more.
        passes: Timed passes of each way, at least 1, after the first one.
        tell: Told what is going on.
        compile_backend: torch.compile's backend. If the model can't be compiled, the way's `Way.failure` says why.
        **options: Of `mmgraph.integrations.transformers.accelerate`; by default what a user gets who gives none.

    Returns:
        The findings, and transformers' own pass without its features, for `loop_way`.
    """
    loop = HubLoop(model, requests, decode_steps=decode_steps)
    dtype = model.lm_head.weight.dtype
    with tell("transformers"):
        hub, medians, first, how = _served(loop, as_it_is(model), passes, None)
    with tell("transformers in the wider dtype"), raised_precision(model, WIDER[dtype]):
        exact = loop.run(forced=hub.tokens)
    ways = [judge(TRANSFORMERS, how, medians, first, Passes(hub, hub, exact))]
    with tell(f"torch.compile, backend {compile_backend}"):
        try:
            way, medians, first, how = _served(loop, compiled(model, compile_backend), passes, hub.tokens)
        except Exception as error:
            # Dynamo, its backends and the C++ compiler raise many kinds; the row says which, and the exit code that
            # not all was done.
            ways.append(Way(COMPILED, f"backend {compile_backend}", {}, None, failure=_words(error)))
        else:
            ways.append(judge(COMPILED, how, medians, first, Passes(hub, way, exact)))
    with tell("transformers, accelerated by mmgraph"):
        way, medians, first, how = _served(loop, accelerated(model, **options), passes, hub.tokens)
    check_errors(loop.device)
    ways.append(judge(ACCELERATED, how, medians, first, Passes(hub, way, exact)))
    return Comparison(tuple(ways), ACCELERATED, rule(dtype)), HubPass(hub.seconds, [], hub.logits, hub.tokens)


def loop_way(
    base: Way,
    hub: HubPass,
    eager_tokens: Tensor,
    captured: PassResult,
    times: Mapping[str, float],
    *,
    first: float,
) -> Way:
    """The loop's captured passes as one more way; they generate as many tokens for the same requests.

    Args:
        base: transformers' own way, as `compare_ways` found it.
        hub: Its pass.
        eager_tokens: int64 ``[steps + 1, requests]``, which the captured passes decoded with.
        captured: A captured pass.
        times: Its median time of each of the loop's phases.
        first: Seconds of capturing and the first pass.
    """
    # A request's steps count as long as both were fed the same tokens before.
    same = (eager_tokens == hub.tokens).long().cumprod(0).bool()
    fed_alike = torch.cat([torch.ones_like(same[:1]), same[:-1]])
    theirs, ours = hub.logits[fed_alike], captured.logits[fed_alike]
    allowed = 0.0 if base.logits is None else base.logits.allowed + base.logits.hub_error
    tokens = compare_tokens(theirs, ours, allowed)
    seconds = {
        "tower": times["encode"],
        "prefill": times["plan"] + times["assemble"] + times["prefill"],
        "decode": times["decode"],
    }
    how = "the captured passes above: requests share steps, and a photo that a step uses twice is encoded once"
    return Way(LOOP, how, seconds, first, tokens=tokens)


@contextmanager
def as_it_is(model: Any) -> Iterator[Details]:
    """transformers, untouched."""
    attention = model.config.vision_config._attn_implementation
    yield lambda _: f"request by request, {attention} attention"


@contextmanager
def compiled(model: Any, backend: str) -> Iterator[Details]:
    """Within it tower and language model are compiled, for any sizes.

    The language model in one graph. The tower can't be: transformers cuts its rows by lengths that it reads back.

    Args:
        model: The model. Afterwards it is as before.
        backend: torch.compile's backend.
    """
    from mmgraph.integrations.transformers.patches import Patches

    tower, language = model.model.visual, model.model.language_model
    patches = Patches()
    # What other models left behind counts towards Dynamo's limit of compiled forms, and code that an earlier process
    # left on disk would make the first pass look cheap.
    torch.compiler.reset()
    config: Any = torch.compiler.config  # its patch comes at run time
    with warnings.catch_warnings(), config.patch(force_disable_caches=True):
        # It says that what was asked for is done.
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        try:
            patches.replace(tower, "forward", torch.compile(tower.forward, dynamic=True, backend=backend))
            patches.replace(
                language,
                "forward",
                torch.compile(language.forward, dynamic=True, fullgraph=True, backend=backend),
            )
            yield (
                lambda _: f"backend {backend}, dynamic shapes; the language model one graph, the tower several"
            )
        finally:
            patches.undo()
            torch.compiler.reset()


@contextmanager
def accelerated(model: Any, **options: Any) -> Iterator[Details]:
    """Within it the model is accelerated by mmgraph.

    Args:
        model: The model. Afterwards it is as before.
        **options: Of `mmgraph.integrations.transformers.accelerate`.
    """
    from mmgraph.integrations.transformers import accelerate

    done = accelerate(model, **options)

    def details(images: int) -> str:
        reports = list(done.report().values())
        if not reports:
            return "accelerate(model); the tower runs uncaptured, as it does on a CPU unless asked"
        served = sum(r.items - sum(r.eager.values()) for r in reports)
        graphs = sum(len(tower.buckets) for r in reports for tower in r.towers.values())
        return f"accelerate(model); {graphs} graphs, {served} of {images} images from them"

    try:
        yield details
    finally:
        done.restore()


def _served(
    loop: HubLoop, way: AbstractContextManager[Details], passes: int, forced: Tensor | None
) -> tuple[HubPass, dict[str, float], float, str]:
    """The last pass, the median time of each phase, the seconds up to the end of the first pass, and how it served."""
    start = time.perf_counter()
    with way as details:
        tokens = loop.run(forced=forced).tokens
        first = time.perf_counter() - start
        fed = tokens if forced is None else forced
        seconds: list[dict[str, float]] = []
        for _ in range(passes):
            last = loop.run(forced=fed)
            seconds.append(last.seconds)
        how = details(loop.images * (passes + 1))
    return last, {phase: statistics.median(s[phase] for s in seconds) for phase in HUB_PHASES}, first, how


def _words(error: Exception) -> str:
    """An error's class and what it says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
