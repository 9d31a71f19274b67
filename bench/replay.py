"""What a call costs on the host: the function itself, a manager's call, and a graph replayed by hand.

The function takes four inputs and returns one tensor; it runs 1, 10, 100 or 1000 small kernels. "by hand" is a captured
graph with the four copies, the padding and the copied output written out, without any check; "bare" is the replay;
"reduce-overhead" is torch.compile's own graphs on the same function, at one shape. Host time is what enqueueing takes.

    PYTHONPATH=. python bench/replay.py --out bench/results/<gpu>/replay.json
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, host_us, show, write

from mmgraph.capture import BucketGrid, CaptureManager, bucket_size, offsets, rows

TOKENS, WIDTH = 200, 64


def chain(kernels: int) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, scale: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        y = x * scale
        for _ in range(kernels - 1):
            y = y + 1.0
        return y

    return function


def by_hand(
    function: Callable[..., torch.Tensor], call: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A graph of the function at 256 rows, with staging and copy-out, and the replay alone."""
    x, scale, cu = call["x"], call["scale"], call["cu"]
    static_x, static_scale = (torch.zeros(256, WIDTH, device=x.device) for _ in range(2))
    static_cu = torch.zeros(9, dtype=torch.int32, device=x.device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function(static_x, static_scale, static_cu, 256)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = function(static_x, static_scale, static_cu, 256)

    def whole() -> torch.Tensor:
        static_x[:TOKENS].copy_(x)
        static_x[TOKENS:].fill_(0)
        static_scale[:TOKENS].copy_(scale)
        static_scale[TOKENS:].fill_(0)
        static_cu[:4].copy_(cu)
        static_cu[4:].copy_(cu[-1:].expand(5))
        graph.replay()
        return out[:TOKENS].clone()

    return whole, graph.replay


def measure(kernels: int, device: torch.device, compiled: bool) -> dict[str, Any]:
    function = chain(kernels)
    call: dict[str, Any] = {
        "x": torch.randn(TOKENS, WIDTH, device=device),
        "scale": torch.randn(TOKENS, WIDTH, device=device),
        "cu": torch.tensor([0, 50, 120, TOKENS], dtype=torch.int32, device=device),
        "longest": 80,
    }
    manager = CaptureManager(
        function,
        inputs={
            "x": rows("tokens"),
            "scale": rows("tokens"),
            "cu": offsets("batch", of="tokens"),
            "longest": bucket_size("seqlen"),
        },
        outputs=rows("tokens"),
        buckets=BucketGrid(tokens=(256, 1024), batch=(8, 32), seqlen=(256, 1024)),
    )
    manager.precompile(call, progress=False)
    row: dict[str, Any] = {"kernels": kernels}
    with torch.inference_mode():
        same = torch.equal(manager(**call), function(**call))
        row["eager us"] = host_us(lambda: function(**call), device, calls=max(5, 1000 // kernels))
        row["manager us"] = host_us(lambda: manager(**call), device)
        if device.type == "cuda":
            whole, bare = by_hand(function, call)
            same = same and torch.equal(whole(), function(**call))
            row["by hand us"] = host_us(whole, device)
            row["bare us"] = host_us(bare, device)
            if compiled:
                reduced = torch.compile(function, mode="reduce-overhead")
                for _ in range(4):
                    reduced(**call)
                row["reduce-overhead us"] = host_us(lambda: reduced(**call), device)
    row["equal"] = same
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few kernels; runs on a CPU too")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke tries it on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = (1, 10) if arguments.smoke else (1, 10, 100, 1000)
    table = [measure(kernels, device, compiled=not arguments.smoke) for kernels in counts]
    show("host time of a call", table)
    if arguments.out:
        write(arguments.out, {"environment": environment(device), "rows": table})
    if not all(row["equal"] for row in table):
        raise SystemExit("a replay differs from the function")


if __name__ == "__main__":
    main()
