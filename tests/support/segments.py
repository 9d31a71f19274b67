"""A function over sequences whose results are exact, and a manager around it, for the tests of capture."""

from typing import Any

import torch

from mmgraph.capture import (
    constant,
    offsets,
    rows,
    static,
)


def segment_means(x: torch.Tensor, cu: torch.Tensor, weight: torch.Tensor, longest: int) -> dict[str, Any]:
    """Rows plus the sum of their sequence; zero for rows of none. Integers in float64, so that sums are exact."""
    position = torch.arange(x.shape[0])
    segment = torch.searchsorted(cu[1:].contiguous(), position, right=True)
    covered = (position < cu[-1])[:, None]
    member = (segment[:, None] == segment[None, :]) & covered & covered.T
    total = member.to(x.dtype) @ x
    merged = torch.where(covered, x * longest + total @ weight, 0)
    return {"main": merged[::2].contiguous(), "deep": [merged * 2, (merged + 1,)], "length": 3}


SPECS: dict[str, Any] = {
    "x": rows("tokens"),
    "cu": offsets("batch", of="tokens"),
    "weight": static(),
    "longest": constant(),
}


OUTPUTS: dict[str, Any] = {
    "main": rows("tokens", per=2),
    "deep": [rows("tokens"), (rows("tokens"),)],
    "length": constant(),
}


def make_call(lengths: list[int], tail: int, seed: int, width: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths) + tail
    tokens += tokens % 2
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    draw = lambda *shape: torch.randint(-9, 9, shape, generator=generator).double()  # noqa: E731
    return {"x": draw(tokens, width), "cu": cu, "weight": draw(width, width), "longest": 7}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["length"] == expected["length"]
    assert torch.equal(got["main"], expected["main"])
    assert torch.equal(got["deep"][0], expected["deep"][0])
    assert isinstance(got["deep"][1], tuple)
    assert torch.equal(got["deep"][1][0], expected["deep"][1][0])
