"""How far apart two passes of the loop may be, how far they are, and whether their tokens agree.

The tolerance is measured, not guessed: a third pass runs eagerly in the next wider dtype on the same inputs, and two
passes may differ by twice the eager pass's own largest error against it, plus one rounding of the largest value. A
token may differ only where the eager pass's own logits for the two tokens are closer than that allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
"""The dtype of the reference pass for each dtype that the loop runs in."""

RULE = "2 x the eager pass's largest error against {wider} + eps({own}) x the largest value"


@dataclass(frozen=True)
class Difference:
    """The largest difference between the eager and the captured values of one kind.

    Attributes:
        name: What was compared.
        absolute: The largest absolute difference; NaN where either has a value that isn't finite.
        relative: That over the largest absolute value of the eager pass.
        allowed: The tolerance, absolute.
        reference_error: The eager pass's own largest error against the wider dtype.
    """

    name: str
    absolute: float
    relative: float
    allowed: float
    reference_error: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.absolute <= self.allowed


@dataclass(frozen=True)
class TokenCheck:
    """How many greedy tokens of the two passes differ.

    Attributes:
        compared: Tokens compared.
        different: Those that differ.
        ties: Those of them where the eager logits of the two tokens are a tie within the tolerance.
    """

    compared: int
    different: int
    ties: int

    @property
    def equal(self) -> bool:
        """Whether no token differs."""
        return self.different == 0

    @property
    def ok(self) -> bool:
        """Whether every token that differs is a tie."""
        return self.different == self.ties


def difference(
    name: str, eager: Sequence[Tensor], captured: Sequence[Tensor], reference: Sequence[Tensor]
) -> Difference:
    """Compare lists of tensors element by element.

    Args:
        name: What they are.
        eager: The eager pass's tensors.
        captured: The captured pass's, of the same shapes.
        reference: The wider pass's, of the same shapes.
    """
    apart, error, largest = 0.0, 0.0, 0.0
    for a, b, exact in zip(eager, captured, reference, strict=True):
        if a.numel() == 0:
            continue
        wide = exact.dtype
        apart = _larger(apart, (a.to(wide) - b.to(wide)).abs().max())
        error = _larger(error, (a.to(wide) - exact).abs().max())
        largest = _larger(largest, exact.abs().max())
    eps = torch.finfo(eager[0].dtype).eps if eager else 0.0
    return Difference(name, apart, apart / largest if largest else apart, 2 * error + eps * largest, error)


def compare_tokens(eager_logits: Tensor, captured_logits: Tensor, allowed: float) -> TokenCheck:
    """Compare the greedy tokens of two passes that were fed the same tokens.

    Args:
        eager_logits: ``[tokens, vocabulary]``.
        captured_logits: The same shape.
        allowed: The tolerance of a logit; two of them may move towards each other.
    """
    ours, theirs = eager_logits.argmax(-1), captured_logits.argmax(-1)
    differ = ours != theirs
    best = eager_logits.float().gather(-1, ours[:, None])
    other = eager_logits.float().gather(-1, theirs[:, None])
    ties = differ & ((best - other)[:, 0] <= 2 * allowed)
    return TokenCheck(len(ours), int(differ.sum()), int(ties.sum()))


def _larger(so_far: float, value: Tensor) -> float:
    """The larger of two numbers; NaN stays, so that a value that isn't finite can't pass."""
    number = float(value)
    return so_far if math.isnan(so_far) or number <= so_far else number
