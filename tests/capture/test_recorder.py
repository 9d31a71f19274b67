"""Invariant: a recording repeats operations on the same storage, shows lifetime bugs, refuses what it cannot repeat."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmgraph.capture import NotCapturableError
from mmgraph.capture.recorder import OutsideMemory, Recording


def test_replay_computes_anew_from_changed_inputs_and_weights() -> None:
    x, out, weight = torch.randn(5, 3), torch.zeros(5, 3), torch.nn.Parameter(torch.randn(3, 3))

    def reference() -> torch.Tensor:
        hidden = (x @ weight).softmax(-1)
        hidden[0] = 1.0
        hidden[hidden < 0.2] = 0.0
        variance, mean = torch.var_mean(hidden, 0)
        return (hidden * variance + mean).detach()

    recording = Recording(lambda: out.copy_(reference()), [x, out])
    for _ in range(3):
        x.normal_()
        with torch.no_grad():
            weight.mul_(-1.5)
        out.fill_(9)
        recording.replay()
        torch.testing.assert_close(out, reference())


def test_memory_that_nothing_wrote_shows_as_nan() -> None:
    x, out = torch.randn(4), torch.zeros(4)

    def partly_written() -> None:
        scratch = torch.empty(4)
        scratch[:2] = x[:2]
        out.copy_(scratch)

    recording = Recording(partly_written, [x, out])
    recording.replay()
    assert torch.equal(out[:2], x[:2])
    assert out[2:].isnan().all()


def test_memory_that_its_owner_freed_shows_as_nan() -> None:
    class Holder:
        table: torch.Tensor | None = torch.ones(3)

    out = torch.zeros(3)
    recording = Recording(lambda: out.copy_(Holder.table.view(3) * 2), [out])  # type: ignore[union-attr]
    recording.replay()
    assert torch.equal(out, torch.full((3,), 2.0))
    Holder.table = None
    recording.replay()
    assert out.isnan().all()


def test_a_parameter_that_was_replaced_is_not_noticed_as_on_a_gpu() -> None:
    module = torch.nn.Linear(3, 3)
    old = module.weight.data
    x, out = torch.randn(2, 3), torch.zeros(2, 3)
    recording = Recording(lambda: out.copy_(module(x)), [x, out])
    module.weight.data = torch.zeros(3, 3)
    recording.replay()
    torch.testing.assert_close(out, x @ old.T + module.bias.detach())


def test_random_operations_draw_anew_and_follow_the_seed() -> None:
    out = torch.zeros(16)
    recording = Recording(lambda: out.copy_(torch.rand(16)), [out])
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        recording.replay()
        draws.append(out.clone())
        recording.replay()
        assert not torch.equal(out, draws[-1])
    assert torch.equal(draws[0], draws[1])


X = torch.arange(4.0)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: X.sum().item(), "scalar is read"),
    "branch": (lambda: 1 if X.sum() > 0 else 2, "branch is taken"),
    "float": (lambda: float(X[0]), "scalar is read"),
    "int": (lambda: int(X[0]), "scalar is read"),
    "index": (lambda: [1, 2][X[0].long()], "scalar is read"),
    "tolist": (lambda: X.tolist(), "values are read"),
    "numpy": (lambda: X.numpy(), "array is made from a tensor"),
    "asarray": (lambda: np.asarray(X), "array is made from a tensor"),
    "cpu": (lambda: X.cpu(), "copied to the host"),
    "equal": (lambda: torch.equal(X, X), "scalar"),
    "nonzero": (lambda: X.nonzero(), "shape depends on data"),
    "where": (lambda: torch.where(X > 1), "shape depends on data"),
    "mask": (lambda: X[X > 1], "boolean mask"),
    "masked_select": (lambda: X.masked_select(X > 1), "shape depends on data"),
    "assign_by_mask": (lambda: X.clone().__setitem__(X > 1, torch.ones(2)), "boolean mask"),
    "unique": (lambda: X.unique(), "shape depends on data"),
    "repeat_interleave": (lambda: X.repeat_interleave(torch.arange(4)), "Python data|shape depends on data"),
    "tensor": (lambda: torch.tensor([1.0, 2.0]), "Python data"),
    "as_tensor": (lambda: torch.as_tensor([1.0]), "Python data"),
    "new_tensor": (lambda: X.new_tensor([1.0]), "Python data"),
    "from_numpy": (lambda: torch.from_numpy(np.ones(2)), "Python data"),
    "unsqueeze_": (lambda: X.clone().unsqueeze_(0), "in place"),
    "resize_": (lambda: X.clone().resize_(2), "in place"),
    "data": (lambda: setattr(X.clone(), "data", torch.ones(4)), "storage is replaced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replay_cannot_repeat_is_refused_by_name(name: str) -> None:
    function, message = REFUSED[name]
    before = X.clone()
    with pytest.raises(NotCapturableError, match=message):
        Recording(lambda: function(), [])
    assert torch.equal(X, before)
    out = torch.zeros(4)
    Recording(lambda: out.copy_(X * 2), [out]).replay()
    assert torch.equal(out, X * 2)


def test_integer_indices_and_fills_by_mask_are_allowed() -> None:
    index, out = torch.randperm(4), torch.zeros(4)

    def function() -> None:
        picked = X[index].clone()
        picked[picked > 2] = -1.0
        picked[0] = 5
        out.copy_(picked)

    Recording(function, [out]).replay()
    expected = X[index].clone()
    expected[expected > 2] = -1.0
    expected[0] = 5
    assert torch.equal(out, expected)


def test_an_array_behind_a_replaced_weight_is_left_alone() -> None:
    array = np.ones((3, 3), np.float32)
    linear, x, out = torch.nn.Linear(3, 3), torch.ones(2, 3), torch.zeros(2, 3)
    linear.weight = torch.nn.Parameter(torch.from_numpy(array))
    recording = Recording(lambda: out.copy_(linear(x)), [x, out])
    linear.weight = torch.nn.Parameter(torch.zeros(3, 3))
    recording.replay()
    assert (array == 1).all()


def test_a_replaced_weight_shows_as_nan_with_any_number_of_recordings() -> None:
    linear, outside = torch.nn.Linear(3, 3), OutsideMemory()
    recordings = []
    for rows in (2, 4):
        x, out = torch.ones(rows, 3), torch.zeros(rows, 3)
        recordings.append(
            (out, Recording(lambda out=out, x=x: out.copy_(linear(x)), [x, out], outside))  # type: ignore[misc]
        )
    linear.weight = torch.nn.Parameter(torch.zeros(3, 3))
    for out, recording in recordings:
        recording.replay()
        assert out.isnan().all()
