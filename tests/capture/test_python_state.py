"""Invariant: a plain Python value that later runs set anew refuses the capture; one of a first run's doesn't.

Either way every value is afterwards what it was.
"""

import collections
import dataclasses
import enum
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.capture import NotCapturableError
from mmgraph.capture.plain import is_plain, same_plain
from mmgraph.capture.state import StateSnapshot

CPU = torch.device("cpu")
SIZES = (16, 8, 4)


def captured(
    fn: Callable[[torch.Tensor], Any], sizes: Sequence[int] = SIZES, ignore: Sequence[str] = ()
) -> tuple[StateSnapshot, list[Any]]:
    """The runs that capturing one bucket after another makes, and what the captures returned."""
    snapshot = StateSnapshot(fn, CPU, [], [], ignore=ignore)
    results = []
    try:
        for size in sizes:

            def run(size: int = size) -> Any:
                return fn(torch.zeros(size))

            snapshot.restore()
            with snapshot.watching():
                run()
            snapshot.refuse_plain_changes(run)
            for _ in range(3):
                snapshot.restore()
                result = run()
            results.append(result)
    finally:
        snapshot.restore(everything=True)
    return snapshot, results


class Phase(enum.Enum):
    EVEN = 0
    ODD = 1


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()


STEPS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: 1 if v is None else v + 1,
    "float": lambda v: 1.5 if v is None else v * 2,
    "complex": lambda v: 1j if v is None else v + 1,
    "bool": lambda v: not v,
    "str": lambda v: "a" if v is None else v + "a",
    "bytes": lambda v: b"a" if v is None else v + b"a",
    "tuple": lambda v: (0, ("x",)) if v is None else (v[0] + 1, ("x",)),
    "size": lambda v: torch.Size([0 if v is None else v[0] + 1]),
    "named tuple": lambda v: Pair(0 if v is None else v.a + 1, None),
    "enumeration": lambda v: Phase.ODD if v is Phase.EVEN else Phase.EVEN,
    "nothing and something": lambda v: "on" if v is None else None,
}


class Counter(torch.nn.Module):
    def __init__(self, step: Callable[[Any], Any], start: Any = None) -> None:
        super().__init__()
        self.step = step
        self.steps = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.step(self.steps)
        return x * 2


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("begun", [False, True])
def test_plain_values_of_every_kind_that_every_run_sets_are_refused(kind: str, begun: bool) -> None:
    step = STEPS[kind]
    start = step(None) if begun else None
    counter = Counter(step, start)
    with pytest.raises(
        NotCapturableError, match=r"sets Counter\.steps .*ignore=\['Counter\.steps'\]"
    ) as caught:
        captured(counter)
    # The old and the new value, of the first two runs.
    first = step(start)
    assert f"from {first!r} to {step(first)!r}" in str(caught.value)
    assert counter.steps is start


class Slots:
    __slots__ = ("late", "steps")

    def __init__(self) -> None:
        self.steps = 0


@dataclasses.dataclass(slots=True)
class Record:
    steps: int = 0


class OnTheClass:
    steps = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        type(self).steps += 1
        return x


class Shadowed:
    """The first run makes an attribute of its own where there was the class's."""

    steps = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x


GLOBAL = 0
SLOTS, RECORD, BAG = Slots(), Record(), types.SimpleNamespace(steps=0)
SETTINGS = types.ModuleType("settings_of_the_user")
SETTINGS.steps = 0


def of_a_global(x: torch.Tensor) -> torch.Tensor:
    global GLOBAL
    GLOBAL += 1
    return x


def of_a_global_to_come(x: torch.Tensor) -> torch.Tensor:
    global TO_COME
    TO_COME = globals().get("TO_COME", 0) + 1
    return x


def of_a_module(x: torch.Tensor) -> torch.Tensor:
    SETTINGS.steps += 1
    return x


def of_a_named_class(x: torch.Tensor) -> torch.Tensor:
    OnTheClass.steps += 1
    return x


def of_slots(x: torch.Tensor) -> torch.Tensor:
    SLOTS.steps += 1
    return x


def of_a_record(x: torch.Tensor) -> torch.Tensor:
    RECORD.steps += 1
    return x


def of_a_bag(x: torch.Tensor) -> torch.Tensor:
    BAG.steps += 1
    return x


def of_a_variable() -> Callable[[torch.Tensor], torch.Tensor]:
    steps = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return x

    return function


ON_THE_CLASS, SHADOWED, VARIABLE = OnTheClass(), Shadowed(), of_a_variable()
NESTED = torch.nn.Sequential(torch.nn.Identity(), Counter(STEPS["int"], 0))
GONE = object()
PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], str, tuple[str, ...], Callable[[], Any]]] = {
    "global": (of_a_global, "the global 'GLOBAL'", ("GLOBAL",), lambda: GLOBAL),
    "global to come": (
        of_a_global_to_come,
        "the global 'TO_COME'",
        ("TO_COME",),
        lambda: globals().get("TO_COME", GONE),
    ),
    "module of Python": (of_a_module, "SETTINGS.steps", ("steps",), lambda: SETTINGS.steps),
    "class by name": (of_a_named_class, "OnTheClass.steps", ("steps",), lambda: OnTheClass.steps),
    "class by type": (ON_THE_CLASS, "OnTheClass.steps", ("steps",), lambda: OnTheClass.steps),
    "attribute to come": (SHADOWED, "Shadowed.steps", ("steps",), lambda: vars(SHADOWED).get("steps", GONE)),
    "slots": (of_slots, "Slots.steps", ("steps",), lambda: SLOTS.steps),
    "slotted dataclass": (of_a_record, "Record.steps", ("steps",), lambda: RECORD.steps),
    "namespace": (of_a_bag, "SimpleNamespace.steps", ("steps",), lambda: BAG.steps),
    "variable": (
        VARIABLE,
        "the variable 'steps' of an enclosing function",
        ("steps",),
        lambda: VARIABLE.__closure__[0].cell_contents,  # type: ignore[attr-defined]
    ),
    "nested module": (NESTED, "Counter '1'.steps", ("steps", "Counter.steps"), lambda: NESTED[1].steps),
    "method": (NESTED.forward, "Counter '1'.steps", ("steps", "Counter.steps"), lambda: NESTED[1].steps),
}


@pytest.mark.parametrize("place", PLACES)
def test_values_are_found_and_put_back_wherever_they_are_bound(place: str) -> None:
    fn, name, _, read = PLACES[place]
    before = read()
    with pytest.raises(NotCapturableError) as caught:
        captured(fn)
    assert f"sets {name} (from 1 to 2)" in str(caught.value)
    assert read() is before


@pytest.mark.parametrize("place", PLACES)
def test_ignored_values_are_let_pass_and_put_back(place: str) -> None:
    fn, name, short, read = PLACES[place]
    before = read()
    for names in ((name,), *((one,) for one in short)):
        captured(fn, ignore=names)
        assert read() is before
    with pytest.raises(NotCapturableError):
        captured(fn, ignore=("step", "Other.steps", "s"))


def test_ignored_counts_are_not_driven_past_their_end() -> None:
    seen = []

    class Position:
        at = 5

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.at)
            self.at += 1
            return x

    captured(Position(), ignore=["Position.at"])
    assert set(seen) == {5}


def test_no_run_drives_a_count_on_the_device_past_its_end() -> None:
    position, seen = torch.zeros((), dtype=torch.int64), []

    class Moves:
        def __init__(self) -> None:
            self.longest = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.longest = max(self.longest, x.shape[0])
            seen.append(position.item())
            return x + position.add_(1)

    captured(Moves())
    assert set(seen) == {0}
    assert len(seen) > 4 * len(SIZES)  # more runs than the captures', since something had to be told apart


def test_what_another_buckets_run_bound_meanwhile_is_put_back_before_the_next_run() -> None:
    log: list[tuple[int, bool]] = []

    class Branches:
        def __init__(self) -> None:
            self.longest, self.large = 0, None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            log.append((x.shape[0], self.large is None))
            if x.shape[0] > self.longest:
                self.longest, self.table = x.shape[0], torch.zeros(x.shape[0])
            if x.shape[0] > 8 and self.large is None:
                self.large = torch.zeros(2)
            return x + self.table[: x.shape[0]]

    captured(Branches(), (16, 4))
    assert (16, False) in log
    assert log[-3:] == [(4, True)] * 3


def test_a_count_that_runs_past_an_end_is_named_although_the_second_run_fails() -> None:
    class Position:
        def __init__(self) -> None:
            self.at = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.at += 1
            return x + torch.zeros(2)[self.at]

    position = Position()
    with pytest.raises(NotCapturableError, match=r"Position\.at \(from 1 to 2\)") as caught:
        captured(position)
    assert isinstance(caught.value.__cause__, IndexError)
    assert position.at == 0


class Rotary(torch.nn.Module):
    """Grows its table to the longest length so far, as many models do."""

    def __init__(self, filled_in_place: bool) -> None:
        super().__init__()
        self.longest, self.kind, self.filled_in_place = 0, None, filled_in_place
        self.register_buffer("table", torch.zeros(16) if filled_in_place else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.longest:
            self.longest, self.kind, self.made = x.shape[0], "made", True
            if self.filled_in_place:
                self.table[: self.longest].copy_(torch.arange(self.longest))
            else:
                self.table = torch.arange(float(self.longest))
        return x + self.table[: x.shape[0]]


@pytest.mark.parametrize("filled_in_place", [False, True])
@settings(max_examples=12)
@given(sizes=st.permutations((16, 8, 4, 2)), begun=st.sampled_from((0, 4, 16)))
def test_caches_that_only_grow_pass_in_any_order_and_every_run_finds_them_whole(
    filled_in_place: bool, sizes: list[int], begun: int
) -> None:
    module = Rotary(filled_in_place)
    if begun:
        module(torch.zeros(begun))
    before = {name: value for name, value in vars(module).items() if name != "_buffers"}
    table = module.table if module.table is None else module.table.clone()
    _, results = captured(module, sizes)
    assert [result.tolist() for result in results] == [list(range(size)) for size in sizes]
    assert {name: value for name, value in vars(module).items() if name != "_buffers"} == before
    assert module.table is table or torch.equal(module.table, table)


def test_work_of_a_first_run_that_makes_no_tensor_is_not_repeated_in_the_captures() -> None:
    class Library:
        def __init__(self) -> None:
            self.ready, self.loads = False, []

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.loads.append("load")
                self.ready = True
            return x

    library = Library()
    captured(library)
    assert library.loads == ["load"]
    assert library.ready is False


@pytest.mark.parametrize("begun", [None, 16, 4])
def test_the_last_buckets_size_is_refused_whatever_was_there_before(begun: int | None) -> None:
    class Last:
        def __init__(self) -> None:
            self.size = begun

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.size = x.shape[0]
            return x

    last = Last()
    with pytest.raises(
        NotCapturableError, match=r"Last\.size \(from 16 to [48]\) differently for another bucket"
    ):
        captured(last)
    assert last.size == begun
    captured(last, ignore=["size"])
    assert last.size == begun
    captured(last, sizes=(16,))  # one bucket alone has one value


OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda v, n: v,
    "count": lambda v, n: v + 1,
    "constant": lambda v, n: 3,
    "size": lambda v, n: n,
    "grow": max,
    "first": lambda v, n: v or n,
    "parity": lambda v, n: n % 2,
    "above eight": lambda v, n: n > 8,
    "count above eight": lambda v, n: v + (n > 8),
    "flip": lambda v, n: not v,
    "nan": lambda v, n: float("nan"),
}


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True),
    start=st.integers(0, 20),
    writes=st.booleans(),
)
def test_refused_is_what_changes_once_every_bucket_has_run(
    names: list[str], sizes: list[int], start: int, writes: bool
) -> None:
    state = torch.zeros(())
    holder = types.SimpleNamespace(**{f"v{i}": start for i in range(len(names))})

    def function(x: torch.Tensor) -> torch.Tensor:
        if writes:
            state.add_(1)
        for i, name in enumerate(names):
            setattr(holder, f"v{i}", OPERATIONS[name](getattr(holder, f"v{i}"), x.shape[0]))
        return x

    before = dict(vars(holder))
    stale = set()
    for i, name in enumerate(names):
        value: Any = start
        for turn in (1, 2, 3):
            for size in sizes:
                new = OPERATIONS[name](value, size)
                stale |= {f"v{i}"} if turn > 1 and not same_plain(value, new) else set()
                value = new
    try:
        captured(function, sizes)
        named = set()
    except NotCapturableError as error:
        named = {word.partition(".")[2] for word in str(error).split() if word.startswith("SimpleNamespace.")}
    assert bool(named) == bool(stale)
    assert named <= stale
    assert vars(holder) == before
    captured(function, sizes, ignore=sorted(stale))
    assert vars(holder) == before
    assert not state.any()


def test_a_function_that_sets_nothing_is_not_run_again_and_the_places_are_looked_at_once_a_bucket() -> None:
    runs = []
    looks = []

    class Many:
        pass

    many = Many()
    vars(many).update({f"a{i}": i for i in range(1000)})

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(many and x.shape[0])
        return x

    with pytest.MonkeyPatch.context() as patch:
        from mmgraph.capture import plain

        moved = plain.PlainTable.moved
        patch.setattr(plain.PlainTable, "moved", lambda table: looks.append(table.name) or moved(table))
        captured(function)
    assert runs == [size for size in SIZES for _ in range(4)]
    assert looks.count("Many.{}") == len(SIZES)


def test_what_a_run_changes_and_changes_back_is_no_change() -> None:
    class Flips(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.train()
            self.eval()
            return x

    module = Flips()
    captured(module)
    assert module.training


def test_locks_loggers_and_other_objects_of_libraries_raise_no_alarm() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock, self.event = threading.RLock(), threading.Event()
            self.table = collections.OrderedDict[int, int]()
            self.compiled = torch.compile(lambda x: x * 2, backend="eager")

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                self.event.set() if not self.event.is_set() else self.event.clear()
                self.table[len(self.table)] = 1  # what containers hold is not looked at
                return self.compiled(x)

    captured(Owner())
    of_a_library = {"__name__": "torch.of_a_library", "COUNT": 0}
    exec("def function(x):\n    global COUNT\n    COUNT += 1\n    return x\n", of_a_library)
    captured(of_a_library["function"])
    assert of_a_library["COUNT"] == 4 * len(SIZES)


def test_values_that_other_threads_set_between_the_runs_are_not_put_back() -> None:
    class Engine:
        def __init__(self) -> None:
            self.closed, self.steps = False, 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x

    engine = Engine()
    snapshot = StateSnapshot(engine, CPU, [], [], ignore=["steps"])
    with snapshot.watching():
        engine(torch.zeros(1))
    engine.closed = True
    snapshot.restore(everything=True)
    assert engine.closed is True
    assert engine.steps == 0


def test_what_counts_as_plain_and_as_the_same() -> None:
    class Sneaky(int):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("code of the user ran")

        __hash__ = None  # type: ignore[assignment]

    for value in (1, True, None, "a", b"a", 1j, float("nan"), (), (1, (None, "a")), Phase.ODD, torch.Size([2])):
        assert is_plain(value)
        assert same_plain(value, value)
    for value in (
        Sneaky(1),
        [1],
        {},
        (1, []),
        (Sneaky(1),),
        torch.zeros(()),
        object(),
        int,
        tuple(range(10_000)),
    ):
        assert not is_plain(value)
    assert same_plain(float("nan"), float("nan"))
    assert same_plain(sys.maxsize + 1, int(str(sys.maxsize + 1)))
    for a, b in (
        (1, True),
        (1, 1.0),
        (0, None),
        ("1", 1),
        ((1,), (1, 2)),
        ((1,), (True,)),
        (Phase.ODD, Phase.EVEN),
    ):
        assert not same_plain(a, b)
