"""Vision towers, pixels to merged rows: transformers eager, with FA3, with graphs, compiled; and mmgraph, in one run.

Random weights of the real architectures (Qwen3-VL-8B and Qwen2.5-VL-7B), bfloat16, pixels on the device, grids where
each way wants them. Ways:

- eager: transformers, with PyTorch's attention. eager + fa3: with FlashAttention 3 (the ``fa3`` backend of mmgraph.ops
  called straight from transformers' registry).
- graph + fa3: that, captured by hand for this one shape, metadata made beforehand.
- reduce-overhead + fa3, compiled graph + fa3: torch.compile's own graphs, and a graph by hand around what it compiled;
  for this one shape, and only for the rows that ``--reduce-overhead`` and ``--compile`` name.
- encoder: `CapturedEncoder` over items, as a serving loop calls it, with buckets of the rows' own sizes. in a row: the
  same without a wait after each call. uncaptured: the same without graphs.
- accelerated: ``mmgraph.integrations.transformers.accelerate`` with its own buckets, which know nothing of the rows but
  the largest, called as transformers calls a tower.

Times are wall times of a call in ms, from the call until the device is done, median of many. "cold s" is what the first
call of a way took with all that it needs (compiling, capturing), and "new shape" the first call of another size, in ms.
"error" is the difference to float32 by norm, relative to that of transformers' own bfloat16.

    PYTHONPATH=. python bench/towers.py --out bench/results/<gpu>/towers.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import environment, show, write
from tower_models import Tower, pixels, qwen2_5, qwen3

from mmgraph import ops
from mmgraph.capture import BucketGrid, CapturedEncoder
from mmgraph.integrations.transformers import accelerate
from mmgraph.integrations.transformers.packed_families import parts_of
from mmgraph.towers.buckets import example_item, room_in
from mmgraph.towers.grids import Grid
from mmgraph.towers.items import PatchItem
from mmgraph.towers.packed import PackedTower

GOALS = {
    ("qwen3-vl-8b", "1 x 448 px"): 2.6,
    ("qwen3-vl-8b", "4 x 448 px"): 8.5,
    ("qwen3-vl-8b", "1 x 1024 px"): 13.5,
    ("qwen3-vl-8b", "8 x 1024 px"): 100.0,
    ("qwen3-vl-8b", "16 mixed"): 26.0,
    ("qwen2.5-vl-7b", "1 x 448 px"): 4.0,
    ("qwen2.5-vl-7b", "4 x 448 px"): 12.0,
    ("qwen2.5-vl-7b", "1 x 1024 px"): 16.0,
    ("qwen2.5-vl-7b", "8 x 1024 px"): 115.0,
}


def wall_ms(call: Callable[[], Any], device: torch.device, seconds: float = 0.5) -> float:
    """Median wall time of a call and the wait for it."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = max(once() for _ in range(2))
    runs = max(5, min(200, int(seconds / max(first, 1e-4))))
    return statistics.median(once() for _ in range(runs)) * 1e3


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of one call and the wait for it, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def fa3_name() -> str:
    """Registers FlashAttention 3, called directly, under a name that transformers gives sequence boundaries to."""
    from transformers import AttentionInterface

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: Any = None,
        cu_seq_lens_q: Any = None, max_length_q: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = ops.varlen_attention(q, k, v, cu_seq_lens_q, int(max_length_q), scale=scaling, backend="fa3")
        return out[None], None

    AttentionInterface.register("bench_flash_fa3", forward)
    return "bench_flash_fa3"


def metadata(visual: Any, grid_thw: torch.Tensor) -> dict[str, Any]:
    """What transformers' tower takes precomputed, made by its own helpers."""
    from transformers import vision_utils as helpers

    made: dict[str, Any] = {
        "position_ids": helpers.get_vision_position_ids(grid_thw, visual.spatial_merge_size)
    }
    made["cu_seqlens"] = helpers.get_vision_cu_seqlens(grid_thw)
    made["max_seqlen"] = int((made["cu_seqlens"][1:] - made["cu_seqlens"][:-1]).max())
    if hasattr(visual, "pos_embed"):
        made["interp_indices"], made["interp_weights"] = helpers.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.spatial_merge_size,
        )
    if hasattr(visual, "window_size"):
        index, cu = helpers.get_vision_window_index(
            grid_thw, visual.spatial_merge_size, visual.window_size, visual.patch_size
        )
        made |= {"window_index": index.to(grid_thw.device), "cu_window_seqlens": cu}
        made["max_window_seqlen"] = int((cu[1:] - cu[:-1]).max())
    return made


class Peers:
    """transformers' own ways on one call."""

    def __init__(self, visual: Any, grids: Sequence[Grid], device: torch.device) -> None:
        self.visual, self.device = visual, device
        self.patches = pixels(visual, grids)
        self.grid_thw = torch.tensor(grids, device=device)

    def eager(self) -> Any:
        return self.visual(self.patches, self.grid_thw).pooler_output

    def by_hand(self, forward: Callable[..., Any]) -> Callable[[], Any]:
        """A captured call of a forward with precomputed metadata."""
        given = metadata(self.visual, self.grid_thw)

        def call() -> Any:
            return forward(self.patches, self.grid_thw, **dict(given)).pooler_output

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

        def replay() -> Any:
            graph.replay()
            return kept

        return replay

    def reduce_overhead(self) -> Callable[[], Any]:
        given = metadata(self.visual, self.grid_thw)
        compiled = torch.compile(self.visual, mode="reduce-overhead", dynamic=False)
        return lambda: compiled(self.patches, self.grid_thw, **dict(given)).pooler_output


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.float() - exact.float()).norm() / exact.float().norm())


def peer_times(
    tower: Tower, compiled: Sequence[str], overhead: Sequence[str], device: torch.device
) -> dict[str, dict[str, Any]]:
    """For each row the peers' times, and the errors of eager bfloat16."""
    visual, found = tower.visual, {}
    cuda = device.type == "cuda"
    for row, grids in tower.rows.items():
        peers = Peers(visual, grids, device)
        times: dict[str, Any] = {}
        visual.config._attn_implementation_internal = "sdpa"
        times["eager"] = wall_ms(peers.eager, device)
        if cuda:
            visual.config._attn_implementation_internal = fa3_name()
            times["eager + fa3"] = wall_ms(peers.eager, device)
            call = peers.by_hand(visual)
            times["graph + fa3"] = wall_ms(call, device)
            del call
            if f"{tower.name}/{row}" in overhead:
                torch._dynamo.reset()
                seconds, call = timed(partial(_warmed, peers.reduce_overhead()), device)
                times["reduce-overhead + fa3 cold s"] = seconds
                times["reduce-overhead + fa3"] = wall_ms(call, device)
                del call
            if f"{tower.name}/{row}" in compiled:
                torch._dynamo.reset()
                compiled_visual = torch.compile(visual, dynamic=False)
                seconds, call = timed(partial(peers.by_hand, compiled_visual), device)
                times["compiled graph + fa3 cold s"] = seconds
                times["compiled graph + fa3"] = wall_ms(call, device)
                del call
        found[row] = times
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()
    visual.config._attn_implementation_internal = "sdpa"
    return found


def _warmed(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(3):
        call()
    return call


def fitted_buckets(tower: Tower, packed: PackedTower) -> BucketGrid:
    """Buckets of a server that knows what it is sent: the rows' own numbers of patches."""
    sizes = {sum(t * h * w for t, h, w in grids) for grids in tower.rows.values()}
    return BucketGrid(tokens=tuple(sorted(sizes)), side=(packed.parts.rotary.length,), derived=room_in(packed))


def our_times(tower: Tower, device: torch.device) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """For each row our times, and what the capture cost."""
    visual = tower.visual
    found: dict[str, dict[str, Any]] = {}
    first_row = next(iter(tower.rows))
    own, exact = Peers(visual, tower.rows[first_row], device).eager(), exact_rows(tower, tower.rows[first_row])
    packed = PackedTower(parts_of(visual))
    encoder = CapturedEncoder(packed, buckets=fitted_buckets(tower, packed), watch=[visual])
    cold, _ = timed(lambda: encoder.precompile([example_item(packed)], progress=False), device)
    for row, grids in tower.rows.items():
        patches = pixels(visual, grids)
        counts = [t * h * w for t, h, w in grids]
        items = [PatchItem(part, grid) for part, grid in zip(patches.split(counts), grids, strict=True)]
        calls = {"encoder": partial(encoder, items), "uncaptured": partial(uncaptured, packed, items)}
        first, result = timed(calls["encoder"], device)
        times: dict[str, Any] = {"patches": sum(counts), "new shape": first * 1e3}
        times |= {name: wall_ms(call, device) for name, call in calls.items()}
        times["in a row"] = in_a_row_ms(calls["encoder"], device)
        times["buckets"] = [pack.bucket and pack.bucket["tokens"] for pack in encoder.explain(items)]
        if row == first_row:
            merged = torch.cat(result)[:, : own.shape[1]]
            times["error"] = relative_error(merged, exact) / max(relative_error(own, exact), 1e-12)
        found[row] = times
    report = encoder.report()
    encoder.close()
    packed.part()
    largest = max(times["patches"] for times in found.values())
    general, done = timed(lambda: accelerate(visual, capture=True, max_tokens=largest), device)
    for row, grids in tower.rows.items():
        call = partial(visual, pixels(visual, grids), torch.tensor(grids))
        found[row]["accelerated"] = wall_ms(call, device)
    done.restore()
    return found, {"precompile s": cold, "accelerate s": general, "report": report.to_dict()}


def uncaptured(packed: PackedTower, items: Sequence[PatchItem]) -> Any:
    return packed.forward(**packed.prepare(items, None))


def in_a_row_ms(call: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Mean time of calls that nobody waits for between: what a busy server sees."""

    def several() -> None:
        for _ in range(calls):
            call()

    several()
    return timed(several, device)[0] / calls * 1e3


def exact_rows(tower: Tower, grids: Sequence[Grid]) -> torch.Tensor:
    """transformers' result in float32, from the same weights."""
    import copy

    visual = copy.deepcopy(tower.visual).float()
    device = next(visual.parameters()).device
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        patches = pixels(tower.visual, grids).float()
        rows: torch.Tensor = visual(patches, torch.tensor(grids, device=device)).pooler_output
        return rows
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def profile(tower: Tower, row: str, device: torch.device) -> list[dict[str, Any]]:
    """Where the time of one row goes, by kernel, in the uncaptured tower."""
    packed = PackedTower(parts_of(tower.visual))
    grids = tower.rows[row]
    patches = pixels(tower.visual, grids)
    inputs = {"patches": patches, **packed.metadata(list(grids))}
    for _ in range(3):
        packed.forward(**inputs)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(5):
            packed.forward(**inputs)
        torch.cuda.synchronize(device)
    totals: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type.name == "CUDA":
            totals.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
    packed.part()
    largest = sorted(totals.items(), key=lambda one: -sum(one[1]))[:25]
    return [
        {"row": row, "kernel": name, "launches": len(times) // 5, "ms": sum(times) / 5e3}
        for name, times in largest
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="two layers and the smallest row, on any device")
    parser.add_argument("--towers", nargs="*", default=["qwen3", "qwen2_5"])
    parser.add_argument("--compile", nargs="*", default=["qwen3-vl-8b/1 x 448 px"], help="rows, as TOWER/ROW")
    parser.add_argument("--reduce-overhead", nargs="*", default=[], help="likewise; half a minute each")
    parser.add_argument("--no-peers", action="store_true", help="mmgraph alone, for work on it")
    parser.add_argument("--profile", nargs="*", default=["1 x 448 px", "8 x 1024 px"])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    makers: dict[str, tuple[Callable[[torch.device, int], Tower], int]] = {
        "qwen3": (qwen3, 27),
        "qwen2_5": (qwen2_5, 32),
    }
    results: dict[str, Any] = {"environment": environment(device), "rows": [], "towers": [], "profile": []}
    for name in arguments.towers:
        make, layers = makers[name]
        tower = make(device, 2 if arguments.smoke else layers)
        if arguments.smoke:
            small: dict[str, tuple[Grid, ...]] = {"1 x 448 px": ((1, 4, 6),)}
            tower = Tower(tower.name, tower.visual, small)
        peers = (
            {}
            if arguments.no_peers
            else peer_times(tower, arguments.compile, arguments.reduce_overhead, device)
        )
        ours, capture = our_times(tower, device)
        for row in tower.rows:
            times = {**peers.get(row, {}), **ours[row]}
            goal = GOALS.get((tower.name, row))
            results["rows"].append({"tower": tower.name, "row": row, "goal": goal, **times})
        results["towers"].append({"tower": tower.name, **capture})
        if device.type == "cuda":
            for row in arguments.profile:
                if row in tower.rows:
                    results["profile"] += [{"tower": tower.name, **one} for one in profile(tower, row, device)]
        write(arguments.out, results)
        del tower
        if device.type == "cuda":
            torch.cuda.empty_cache()
    columns = [
        "tower",
        "row",
        "eager",
        "eager + fa3",
        "graph + fa3",
        "encoder",
        "accelerated",
        "uncaptured",
        "goal",
    ]
    show("vision towers, ms", [{name: row.get(name) for name in columns} for row in results["rows"]])
    for row in results["rows"]:
        print(row)
    for row in results["profile"]:
        print(row)


if __name__ == "__main__":
    main()
