"""Invariant: capturing leaves every state as it was, wherever it lives; a call changes it as often as it is made."""

import collections
import dataclasses
import functools
import threading
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmgraph.capture import (
    BucketGrid,
    CaptureFailedError,
    CaptureManager,
    NotCapturableError,
    constant,
    rows,
    static,
)
from mmgraph.capture.places import Place

GRID = BucketGrid(n=(4, 8, 16))


def captured(fn: Callable[..., Any], **options: Any) -> CaptureManager:
    manager = CaptureManager(fn, inputs={"x": rows("n")}, outputs=rows("n"), buckets=GRID, **options)
    return manager.precompile({"x": torch.zeros(3)}, progress=False)


class Slots:
    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = torch.zeros(())


@dataclasses.dataclass(slots=True)
class Record:
    state: torch.Tensor


class OnTheClass:
    state = torch.zeros(())


GLOBAL = torch.zeros(())
IN_NESTED, IN_FORWARD, CACHED, IN_QUEUE = (torch.zeros(()) for _ in range(4))
SLOTS, RECORD, QUEUE = Slots(), Record(torch.zeros(())), collections.deque([IN_QUEUE])


@functools.lru_cache(maxsize=1)
def cached() -> torch.Tensor:
    return CACHED


class Forward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(1)
        self.parameter = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        IN_FORWARD.add_(1)
        self.parameter.add_(1)
        self.inner(x[:, None] + IN_FORWARD)
        return x + IN_FORWARD


FORWARD = Forward()


def bump(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + state.add_(1)


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return IN_NESTED.add_(1)

    return x + inner()


PLACES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "global": (lambda x: x + GLOBAL.add_(1), GLOBAL),
    "global named in a nested function": (nested, IN_NESTED),
    "global named in a module's forward": (FORWARD, IN_FORWARD),
    "parameter": (FORWARD, FORWARD.parameter),
    "statistics of a module": (FORWARD, FORWARD.inner.running_mean),
    "slots": (lambda x: bump(SLOTS.state, x), SLOTS.state),
    "slotted dataclass": (lambda x: bump(RECORD.state, x), RECORD.state),
    "class attribute": (lambda x: bump(OnTheClass.state, x), OnTheClass.state),
    "deque": (lambda x: bump(QUEUE[0], x), IN_QUEUE),
    "behind a cache": (lambda x: bump(cached(), x), CACHED),
    "partial": (functools.partial(bump, state := torch.zeros(())), state),
}


@pytest.mark.parametrize("place", PLACES)
def test_state_is_put_back_wherever_it_lives(place: str) -> None:
    fn, state = PLACES[place]
    before = state.clone()
    name = "args" if isinstance(fn, functools.partial) else "x"
    assert name
    manager = captured(fn)
    assert torch.equal(state, before)
    manager(x=torch.zeros(5))
    assert not torch.equal(state, before)


def test_a_function_that_counts_is_never_driven_past_its_end() -> None:
    cache, position = torch.zeros(16), torch.zeros(1, dtype=torch.int64)

    def write(x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, x[:1])
        position.add_(1)
        return x + cache.sum()

    manager = captured(write)
    assert position.item() == 0
    assert not cache.any()
    for step in range(16):
        manager(x=torch.ones(3))
        assert position.item() == step + 1
    assert cache.tolist() == [1.0] * 16


def test_every_run_begins_with_the_examples_rows_and_the_runs_are_counted() -> None:
    seen: list[list[float]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone().numpy().tolist() if not seen_by_recorder() else [])
        return x.add_(1)

    def seen_by_recorder() -> bool:
        return len(seen) % 4 == 3  # the fourth run of each bucket is recorded, and may not be read

    manager = CaptureManager(
        function, inputs={"x": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,)), warmup=2
    )
    manager.precompile({"x": torch.tensor([1.0, 2.0])}, progress=False)
    assert seen == [[1.0, 2.0, 1.0, 2.0]] * 3 + [[]]


def test_what_the_function_writes_into_its_inputs_stays_with_it_on_a_hit_and_on_a_miss() -> None:
    manager = captured(lambda x: x.add_(1))
    for n in (3, 16, 20):
        x = torch.zeros(n)
        assert manager(x=x).tolist() == [1.0] * n
        assert not x.any()
    assert manager.report().hits == 2


def test_constants_that_the_function_writes_are_put_back() -> None:
    table = torch.zeros(2)
    manager = CaptureManager(
        lambda x, table: x + table.add_(1).sum(),
        inputs={"x": rows("n"), "table": constant()},
        outputs=rows("n"),
        buckets=GRID,
    )
    manager.precompile({"x": torch.zeros(3), "table": table}, progress=False)
    assert not table.any()
    assert manager(x=torch.zeros(3), table=table).tolist() == [2.0] * 3
    assert table.tolist() == [1.0, 1.0]


def test_tensors_that_nobody_writes_are_not_touched(tmp_path: Any) -> None:
    path = tmp_path / "table.bin"
    np.ones(3, np.float32).tofile(path)
    with pytest.warns(UserWarning, match="not writable"):
        read_only = torch.from_numpy(np.memmap(path, np.float32, "r"))
    saved = torch.ones(3)
    parameter = torch.randn(3, requires_grad=True)
    loss = (parameter * saved).sum()
    manager = captured(lambda x: x + read_only.sum() * saved.sum())
    loss.backward()  # an in-place write to `saved` would be refused here
    assert manager(x=torch.zeros(2)).tolist() == [9.0, 9.0]


class Rebinds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + 1
        return x + self.h.sum()


HELD = {"h": torch.zeros(3)}


def rebinds_an_entry(x: torch.Tensor) -> torch.Tensor:
    HELD["h"] = HELD["h"] + 1
    return x + HELD["h"].sum()


def rebinds_a_global(x: torch.Tensor) -> torch.Tensor:
    global REBOUND
    REBOUND = REBOUND + 1
    return x + REBOUND.sum()


REBOUND = torch.zeros(3)


@pytest.mark.parametrize(
    ("function", "place", "read"),
    [
        (module := Rebinds(), "Rebinds.h", lambda: module.h),
        (rebinds_an_entry, "a dictionary's entry", lambda: HELD["h"]),
        (rebinds_a_global, "the global 'REBOUND'", lambda: REBOUND),
    ],
)
def test_a_function_that_binds_its_state_anew_is_refused_and_its_state_kept(
    function: Any, place: str, read: Callable[[], torch.Tensor]
) -> None:
    before = read()
    with pytest.raises(CaptureFailedError, match=f"sets {place}") as caught:
        captured(function)
    assert isinstance(caught.value.__cause__, NotCapturableError)
    assert read() is before
    assert not before.any()


def test_what_the_function_keeps_at_first_use_is_not_kept_from_a_capture() -> None:
    class Lazy:
        table: torch.Tensor | None = None

        def __init__(self) -> None:
            self.table = None
            self.by_size: dict[int, torch.Tensor] = {}

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(3.0)
            if x.shape[0] not in self.by_size:
                self.by_size[x.shape[0]] = torch.full_like(x, 2.0)
            return x + self.table.sum() + self.by_size[x.shape[0]]

    lazy = Lazy()
    manager = captured(lazy)
    assert lazy.table is None
    assert lazy.by_size == {}
    assert manager(x=torch.zeros(3)).tolist() == [5.0] * 3
    assert lazy(torch.zeros(2)).tolist() == [5.0] * 2


def test_state_made_in_inference_mode_is_written_and_put_back() -> None:
    with torch.inference_mode():
        cache = torch.zeros(16)

        def write(x: torch.Tensor) -> torch.Tensor:
            cache[: x.shape[0]].add_(x)
            return x + cache.sum()

        manager = captured(write)
        assert not cache.any()
        assert manager(x=torch.ones(3)).tolist() == [4.0] * 3
        assert cache.sum() == 3


def test_a_decorated_functions_state_is_reached() -> None:
    state = torch.zeros(())

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + state.add_(1)

    @functools.wraps(plain)
    def decorated(*args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs)

    captured(decorated)
    assert state == 0


def test_generators_that_the_function_holds_go_on_as_if_nothing_had_run() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    captured(lambda x: x + torch.rand(x.shape, generator=generator))
    assert torch.equal(torch.rand(3, generator=generator), expected)


def test_compiled_functions_are_recorded_by_what_they_do_eagerly() -> None:
    state = torch.zeros(())

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + state.add_(1)

    manager = captured(compiled)
    assert state == 0
    assert manager(x=torch.ones(3)).tolist() == [3.0] * 3
    assert state == 1


def test_static_inputs_of_any_kind() -> None:
    manager = CaptureManager(
        lambda x, s: x * s,
        inputs={"x": rows("n"), "s": static()},
        outputs=rows("n"),
        buckets=BucketGrid(n=(4,)),
    )
    manager.precompile({"x": torch.zeros(3), "s": torch.tensor(1.0)}, progress=False)
    for value in (2.0, -3.0):
        assert manager(x=torch.ones(2), s=torch.tensor(value)).tolist() == [value] * 2


def test_intermediates_are_not_held_while_writes_are_watched() -> None:
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x + 1
            references.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in references))
        references.clear()
        return x

    captured(function)
    assert alive[0] <= 2  # the watched run; what is recorded later is held on purpose


def test_state_is_put_back_where_the_function_fails_after_writing_it_unseen() -> None:
    norm = torch.nn.BatchNorm1d(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        norm(x[:, None] + 1)
        raise ValueError("by the user")

    before = norm.running_mean.clone()
    with pytest.raises(CaptureFailedError, match="by the user"):
        captured(function)
    assert torch.equal(norm.running_mean, before)


class Odd:
    """Objects that a walk over attributes must survive without running their code."""

    calls = 0

    @property
    def side_effect(self) -> int:
        Odd.calls += 1
        raise RuntimeError("a property was called")

    def __getattr__(self, name: str) -> Any:
        Odd.calls += 1
        raise KeyError(name)


class OddList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("an iterator was called")

    def __len__(self) -> int:
        raise RuntimeError("a length was asked for")


class Lying:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("its class was asked for")


def dead_proxy() -> Any:
    class Target:
        pass

    target = Target()
    return weakref.proxy(target)


ODD: dict[str, Callable[[], Any]] = {
    "raising __getattr__": Odd,
    "list with code of its own": lambda: OddList([torch.ones(1)]),
    "lying class": Lying,
    "dead proxy": dead_proxy,
    "mock": lambda: unittest.mock.MagicMock(spec=dict),
    "script module": lambda: torch.jit.script(torch.nn.BatchNorm1d(1)),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "lock": threading.Lock,
    "fake tensor": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "uninitialised buffer": lambda: torch.nn.parameter.UninitializedBuffer(),
    "weak reference": lambda: weakref.ref(torch.nn.Linear(1, 1)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_strange_objects_in_reach_neither_run_nor_stop_a_capture(name: str) -> None:
    strange = ODD[name]()
    Odd.calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if id(strange) else x

    assert captured(function)(x=torch.ones(3)).tolist() == [2.0] * 3
    assert Odd.calls == 0


def in_tuple(holder: Any) -> None:
    holder.state = (holder.state[0] + 1,)


def in_new_list(holder: Any) -> None:
    holder.state = [tensor + 1 for tensor in holder.state]


def in_place_of_item(holder: Any) -> None:
    holder.state[0] = holder.state[0] + 1


def in_deque(holder: Any) -> None:
    holder.state.append(holder.state[0] + 1)


@pytest.mark.parametrize(
    ("state", "step"),
    [
        (lambda: (torch.zeros(2),), in_tuple),
        (lambda: [torch.zeros(2)], in_new_list),
        (lambda: [torch.zeros(2)], in_place_of_item),
        (lambda: collections.deque([torch.zeros(2)], maxlen=1), in_deque),
    ],
)
def test_state_in_containers_that_is_bound_anew_is_refused_and_kept(
    state: Any, step: Callable[[Any], None]
) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state = state()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            step(self)
            return x + self.state[0].sum()

    holder = Holder()
    before, tensor = holder.state, holder.state[0]
    with pytest.raises(CaptureFailedError, match="to another tensor"):
        captured(holder)
    assert holder.state is before
    assert holder.state[0] is tensor
    assert not tensor.any()


def test_what_is_near_is_found_although_a_longer_path_leads_there_too() -> None:
    class Node:
        pass

    class Engine:
        def __init__(self) -> None:
            self.cache = {"k": torch.zeros(2)}
            node = self.chain = Node()
            for _ in range(3):
                node.next = Node()  # type: ignore[attr-defined]
                node = node.next  # type: ignore[attr-defined]
            node.cache = self.cache  # type: ignore[attr-defined]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.cache["k"] = self.cache["k"] + 1
            return x + self.cache["k"].sum()

    engine = Engine()
    with pytest.raises(CaptureFailedError, match="to another tensor"):
        captured(engine)
    assert not engine.cache["k"].any()


def test_what_is_only_stored_is_no_state_whether_or_not_it_ran_before() -> None:
    class Stores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            self.seen.append(self.last)
            return self.last + 1

    module = Stores()
    module(torch.zeros(2))
    last, seen = module.last, list(module.seen)
    assert captured(module)(x=torch.ones(3)).tolist() == [3.0] * 3
    assert module.last is last
    assert [a is b for a, b in zip(module.seen, seen, strict=True)] == [True]


def test_a_capture_looks_at_many_objects_once_and_not_for_every_run() -> None:
    looked = []

    class Counted(Place):
        def changed(self) -> bool:
            looked.append(self.name)
            return super().changed()

    vocabulary = {str(i): None for i in range(200)}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if vocabulary else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmgraph.capture.reach.Place", Counted)
        captured(function)
    assert 200 <= len(looked) < 200 * 2 * len(GRID)  # once a bucket, of four runs and three replays


def test_wrapped_functions_are_asked_for_their_own_parameters() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    @functools.wraps(plain)
    def masked(*args: Any, mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs) * mask

    manager = CaptureManager(
        masked, inputs={"x": rows("n"), "mask": rows("n")}, outputs=rows("n"), buckets=BucketGrid(n=(4,))
    )
    manager.precompile({"x": torch.ones(3), "mask": torch.ones(3)}, progress=False)
    assert manager(x=torch.ones(2), mask=torch.tensor([1.0, 0.0])).tolist() == [1.0, 0.0]


def test_operations_that_cannot_be_watched_or_recorded_fail_the_capture_and_nothing_else() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(torch.ones((), dtype=torch.bool), lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(CaptureFailedError) as caught:
        captured(function)
    assert "_Watch" not in str(caught.value)
    assert captured(lambda x: x * 2)(x=torch.ones(2)).tolist() == [2.0, 2.0]
