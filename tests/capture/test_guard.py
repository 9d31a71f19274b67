"""Invariant: a guard names what was replaced, as soon as its mode promises, and nothing that was only written."""

import copy
import functools
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import mmgraph.errors
from mmgraph.capture import _compat
from mmgraph.capture.guard import WeightGuard

Mode = Literal["always", "epoch"]
MODES: tuple[Mode, ...] = ("always", "epoch")

SCALE = torch.ones(3)
MODEL_AT_A_GLOBAL = torch.nn.Linear(1, 1)


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(*(shape or (3, 3))))


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.twin, self.tied = (torch.nn.Linear(3, 3) for _ in range(3))
        self.tied.weight = self.head.weight
        self.plain = torch.nn.Linear(3, 3, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(3)
        self.table = torch.ones(4)


class Engine:
    """Weights at every kind of place, and a function that reads them."""

    def __init__(self) -> None:
        self.model, self.parts, self.pair = Tower(), [torch.nn.Linear(3, 3)], (torch.nn.Linear(3, 3),)
        self.rope, self.tables, self.by_name = torch.ones(2), [torch.ones(5)], {"a": torch.ones(6)}
        self.untouched, self.options = torch.ones(7), {"a": 1}
        shift, projection = torch.ones(8), torch.nn.Linear(2, 2)

        def run(x: torch.Tensor) -> torch.Tensor:
            return self.model(x) + SCALE + shift + projection(x) + MODEL_AT_A_GLOBAL(x)

        self.run = run
        self.cells = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))
        self.seen = [self.rope, *self.tables, *self.by_name.values(), shift, SCALE, self.model.table]

    def guard(self, mode: Mode, **options: Any) -> WeightGuard:
        return WeightGuard(self.run, seen=self.seen, mode=mode, **{"slice_size": 7, **options})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture(autouse=True)
def globals_put_back() -> Iterator[None]:
    before = dict(globals())
    yield
    globals().update(before)


def noticed(guard: WeightGuard, slice_size: int = 7) -> tuple[str, ...]:
    """What the guard says after as many calls as it may take."""
    names: tuple[str, ...] = ()
    for _ in range(math.ceil(guard.num_watched / slice_size) if guard._slice_size else 1):
        names = guard.stale()
    return names


def loads(engine: Engine) -> None:
    state = {k: v.clone() for k, v in engine.model.twin.state_dict().items()}
    engine.model.twin.load_state_dict(state, assign=True)


def swaps(engine: Engine) -> None:
    torch.utils.swap_tensors(engine.model.twin.weight, weight())


def resizes(engine: Engine) -> None:
    engine.model.norm.get_buffer("running_mean").resize_(10_000)


TWIN = "Linear 'twin'.weight"
# By what is done: the name that the guard must give.
REPLACEMENTS: dict[str, tuple[Callable[[Engine], object], str]] = {
    "setattr": (lambda e: setattr(e.model.twin, "weight", weight()), TWIN),
    "setattr, other shape": (lambda e: setattr(e.model.twin, "weight", weight(2, 2)), TWIN),
    "register_parameter": (lambda e: e.model.twin.register_parameter("weight", weight()), TWIN),
    "register_buffer": (
        lambda e: e.model.norm.register_buffer("running_mean", torch.ones(3)),
        "BatchNorm1d 'norm'.running_mean",
    ),
    "a buffer set": (
        lambda e: setattr(e.model.norm, "running_var", torch.ones(3)),
        "BatchNorm1d 'norm'.running_var",
    ),
    "load_state_dict(assign)": (loads, TWIN),
    "the table": (lambda e: e.model.twin._parameters.update(weight=weight()), TWIN),
    "another table": (lambda e: vars(e.model.twin).update(_parameters={"weight": weight()}), TWIN),
    "data": (lambda e: setattr(e.model.twin.weight, "data", torch.ones(3, 3)), TWIN),
    "data, transposed": (lambda e: setattr(e.model.twin.weight, "data", e.model.twin.weight.data.t()), TWIN),
    "data, part": (lambda e: setattr(e.model.twin.weight, "data", e.model.twin.weight.data[:2]), TWIN),
    "data, as integers": (
        lambda e: setattr(e.model.norm.running_mean, "data", e.model.norm.running_mean.view(torch.int32)),
        "BatchNorm1d 'norm'.running_mean",
    ),
    "swap_tensors": (swaps, TWIN),
    "to": (lambda e: e.model.twin.to(torch.float64), TWIN),
    "half": (lambda e: e.model.half(), TWIN),
    "half, its buffers": (lambda e: e.model.half(), "BatchNorm1d 'norm'.running_mean"),
    "to_empty": (lambda e: e.model.twin.to_empty(device="cpu"), TWIN),
    "to meta": (lambda e: e.model.twin.to("meta"), TWIN),
    "its storage emptied": (lambda e: e.model.twin.weight.untyped_storage().resize_(0), TWIN),
    "resize_": (resizes, "BatchNorm1d 'norm'.running_mean"),
    "tied": (lambda e: setattr(e.model.twin, "weight", e.model.head.weight), TWIN),
    "untied": (lambda e: setattr(e.model.tied, "weight", weight()), "Linear 'tied'.weight"),
    "set to None": (lambda e: setattr(e.model.twin, "weight", None), TWIN),
    "deleted": (lambda e: delattr(e.model.twin, "weight"), TWIN),
    "a bias that comes": (lambda e: setattr(e.model.plain, "bias", weight(3)), "Linear 'plain'.bias"),
    "a submodule": (lambda e: setattr(e.model, "twin", torch.nn.Identity()), "Tower.twin"),
    "a submodule, in the table": (lambda e: e.model._modules.update(twin=torch.nn.Identity()), "Tower.twin"),
    "a submodule deleted": (lambda e: delattr(e.model, "twin"), "Tower.twin"),
    "a ModuleList's item": (
        lambda e: e.model.layers.__setitem__(1, torch.nn.Linear(3, 3)),
        "ModuleList 'layers'.1",
    ),
    "a ModuleList's last deleted": (lambda e: e.model.layers.__delitem__(2), "ModuleList 'layers'.2"),
    "a ModuleList's, turned": (
        lambda e: e.model.layers._modules.update(zip("012", list(e.model.layers)[::-1], strict=True)),
        "ModuleList 'layers'.0",
    ),
    "a module in a list": (lambda e: e.parts.__setitem__(0, torch.nn.Linear(3, 3)), "item 0 of a list"),
    "a list emptied": (lambda e: e.parts.clear(), "item 0 of a list"),
    "a list with a module": (lambda e: setattr(e, "parts", [torch.nn.Linear(3, 3)]), "Engine.parts"),
    "a tuple with a module": (lambda e: setattr(e, "pair", (torch.nn.Linear(3, 3),)), "Engine.pair"),
    "a module of an object": (lambda e: setattr(e, "model", Tower()), "Engine.model"),
    "a tensor of an object": (lambda e: setattr(e, "rope", torch.ones(2)), "Engine.rope"),
    "a tensor of an object, deleted": (lambda e: delattr(e, "rope"), "Engine.rope"),
    "a tensor of an object, its data": (lambda e: setattr(e.rope, "data", torch.ones(2)), "Engine.rope"),
    "a tensor of a module": (lambda e: setattr(e.model, "table", torch.ones(4)), "Tower.table"),
    "a tensor in a list": (lambda e: e.tables.__setitem__(0, torch.ones(5)), "item 0 of a list"),
    "a list with a tensor": (lambda e: setattr(e, "tables", [torch.ones(5)]), "Engine.tables"),
    "a tensor in a dictionary": (
        lambda e: e.by_name.update(a=torch.ones(6)),
        "a dictionary's entry ['a']",
    ),
    "a tensor of a closure": (
        lambda e: setattr(e.cells["shift"], "cell_contents", torch.ones(8)),
        "a variable of an enclosing function",
    ),
    "a module of a closure": (
        lambda e: setattr(e.cells["projection"], "cell_contents", torch.nn.Linear(2, 2)),
        "a variable of an enclosing function",
    ),
    "a global tensor": (lambda e: globals().update(SCALE=torch.ones(3)), "the global 'SCALE'"),
    "a global module": (
        lambda e: globals().update(MODEL_AT_A_GLOBAL=torch.nn.Linear(1, 1)),
        "the global 'MODEL_AT_A_GLOBAL'",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_what_was_replaced_is_named_until_it_is_put_back(engine: Engine, how: str, mode: Mode) -> None:
    replace, name = REPLACEMENTS[how]
    guard = engine.guard(mode)
    assert noticed(guard) == ()
    replace(engine)
    names = noticed(guard)
    assert name in names
    assert guard.stale() == names, "it stays so"
    guard.close()
    assert guard.stale() == ()


def writes(engine: Engine) -> None:
    with torch.no_grad():
        engine.model.twin.weight.copy_(torch.zeros(3, 3)).mul_(2)
    for tensor in engine.seen:
        tensor.add_(1)


KEPT: dict[str, Callable[[Engine], object]] = {
    "writes in place": writes,
    "writes to data": lambda e: e.model.twin.weight.data.zero_(),
    "load_state_dict": lambda e: e.model.load_state_dict({k: v + 1 for k, v in e.model.state_dict().items()}),
    "requires_grad_": lambda e: e.model.requires_grad_(False),
    "gradients": lambda e: e.model.twin(torch.ones(2, 3)).sum().backward(),
    "hooks": lambda e: e.model.register_forward_hook(lambda *_: None),
    "eval": lambda e: e.model.eval(),
    "a step of an optimizer": lambda e: torch.optim.SGD(e.model.parameters(), 0.1).step(),
    "to the same": lambda e: e.model.to(torch.float32),
    "new attributes": lambda e: (setattr(e, "more", torch.ones(3)), setattr(e.model, "more", torch.ones(3))),
    "a new submodule": lambda e: setattr(e.model, "more", torch.nn.Linear(3, 3)),
    "a new buffer": lambda e: e.model.register_buffer("more", torch.ones(3)),
    "a tensor that the function did not read": lambda e: setattr(e, "untouched", torch.zeros(7)),
    "other values": lambda e: e.options.update(a=2),
    "another module's weights": lambda e: setattr(torch.nn.Linear(3, 3), "weight", weight()),
    "the same again": lambda e: setattr(e.model.twin, "weight", e.model.twin.weight),
    "the same memory": lambda e: setattr(e.model.twin, "weight", torch.nn.Parameter(e.model.twin.weight.data)),
    "the same memory in data": lambda e: setattr(e.rope, "data", e.rope.view(2)),
    "the same in another list": lambda e: setattr(e, "parts", list(e.parts)),
    "the same in another table": lambda e: vars(e.model.twin).update(
        _parameters=dict(e.model.twin._parameters)
    ),
    "deleted and put back": lambda e: e.model.layers.insert(1, pop(e.model.layers, 1)),
}


def pop(modules: torch.nn.ModuleList, index: int) -> torch.nn.Module:
    module = modules[index]
    del modules[index]
    return module


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", KEPT)
def test_what_was_not_replaced_is_not_named_and_stays_watched(engine: Engine, how: str, mode: Mode) -> None:
    guard = engine.guard(mode)
    KEPT[how](engine)
    guard.invalidate()
    assert guard.stale() == ()
    assert noticed(guard) == ()
    engine.model.twin._parameters["weight"] = weight()
    engine.parts[0] = torch.nn.Linear(3, 3)
    assert set(noticed(guard)) == {TWIN, "item 0 of a list"}


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_for_which_the_same_memory_was_bound_is_kept_alive(mode: Mode) -> None:
    holder = [torch.ones(3)]
    guard = WeightGuard(lambda: holder, seen=holder, mode=mode)
    first = weakref.ref(holder[0])
    holder[0] = holder[0].view(3).detach()
    assert noticed(guard) == ()
    second = weakref.ref(holder[0])
    holder[0] = torch.ones(3)
    assert noticed(guard) == ("item 0 of a list",)
    gc.collect()
    assert first() is not None
    assert second() is not None
    guard.close()
    gc.collect()
    assert first() is second() is None


@pytest.mark.parametrize("mode", MODES)
def test_tensors_and_modules_to_watch_and_tensors_without_a_place(mode: Mode) -> None:
    first, second, read, static = (torch.ones(3, n, dtype=torch.bfloat16) for n in (4, 4, 4, 5))
    module = torch.nn.Linear(2, 2)
    guard = WeightGuard(
        functools.partial(torch.add, first),
        watch={"lora": module, "scales": second},
        seen=[read, static],
        ignore=[static],
        mode=mode,
    )
    assert noticed(guard) == ()
    for tensor in (first, second, read, static):
        tensor.data = tensor.data.clone()
    module.bias = None
    names = {"scales", "a tensor bfloat16 [3, 4] that the function reads", "lora: Linear.bias"}
    assert set(noticed(guard)) == names
    guard = WeightGuard(len, watch=[module], mode=mode)
    module.weight = weight()
    assert noticed(guard) == ("Linear.weight",)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", ["compiled", "compiled module", "partial", "method", "decorated", "scripted"])
def test_modules_are_found_behind_wrappers(wrap: str, mode: Mode) -> None:
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def run(x: torch.Tensor) -> Any:
        return module(x)

    fn: Any = {
        "compiled": lambda: torch.compile(run),
        "compiled module": lambda: torch.compile(module),
        "partial": lambda: functools.partial(torch.nn.Module.__call__, module),
        "method": lambda: module.forward,
        "decorated": lambda: functools.lru_cache(functools.wraps(run)(lambda x: None)),
        "scripted": lambda: torch.jit.script(module),
    }[wrap]()
    guard = WeightGuard(fn, mode=mode, slice_size=7)
    assert noticed(guard) == ()
    module[0].weight.data = torch.ones(3, 3)
    names = noticed(guard)
    assert len(names) == 1
    assert "weight" in names[0]


def test_what_goes_through_a_module_is_noticed_at_the_next_call(engine: Engine) -> None:
    guard = engine.guard("epoch", slice_size=1)
    for how in ("setattr", "register_buffer", "a submodule", "load_state_dict(assign)"):
        kept = copy.copy(engine.model._modules), copy.copy(engine.model.twin._parameters)
        mean = engine.model.norm.running_mean
        replace, name = REPLACEMENTS[how]
        replace(engine)
        assert name in guard.stale(), how
        engine.model._modules.update(kept[0])
        engine.model.twin._parameters.update(kept[1])
        engine.model.norm._buffers["running_mean"] = mean
        assert guard.stale() == ()


class LoadsByItself(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self._parameters["weight"] = torch.nn.Parameter(state_dict[prefix + "weight"])


def test_a_module_that_loads_in_its_own_way_is_noticed_at_the_next_call() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(9)), LoadsByItself(3, 3))
    guard = WeightGuard(module.forward, slice_size=1)
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()})
    assert guard.stale() == ("LoadsByItself '9'.weight",)
    guard.close()
    assert not module._load_state_dict_post_hooks


@pytest.mark.parametrize("slice_size", [1, 3, 100])
@pytest.mark.parametrize("how", ["the table", "data", "data, transposed"])
def test_what_no_hook_sees_is_noticed_within_one_round(engine: Engine, how: str, slice_size: int) -> None:
    guard = engine.guard("epoch", slice_size=slice_size)
    rounds = math.ceil(guard.num_watched / slice_size)
    for start in range(0, rounds, 5):
        memory, parameter = engine.model.twin.weight.data, engine.model.twin.weight
        for _ in range(start):
            assert guard.stale() == ()
        REPLACEMENTS[how][0](engine)
        calls = next(i for i in range(1, rounds + 1) if guard.stale())
        assert calls <= rounds
        parameter.data = memory
        engine.model.twin._parameters["weight"] = parameter
        assert guard.stale() == ()


def test_invalidate_has_the_next_call_look_at_everything(engine: Engine) -> None:
    guard = engine.guard("epoch", slice_size=1)
    engine.model.twin.weight.data = torch.ones(3, 3)
    guard.invalidate()
    assert guard.stale() == (TWIN,)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_gradients_and_inference_are_not_replacements(engine: Engine, mode: Mode) -> None:
    guard = engine.guard(mode)
    for _ in range(2):
        for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.device("meta")):
            with context:
                assert noticed(guard) == ()
    with torch.inference_mode():
        engine.model.twin.weight.data = torch.ones(3, 3)
        assert noticed(guard) == (TWIN,)


def test_builds_without_the_fast_comparison_of_addresses(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
        return all(tensors[i].data_ptr() == addresses[i] for i in indices)

    for stand_in in (None, slow):
        monkeypatch.setattr(_compat, "_equal_addresses", stand_in)
        guard = engine.guard("always")
        assert guard.stale() == ()
        memory, engine.rope.data = engine.rope.data, torch.ones(2)
        assert "Engine.rope" in guard.stale()
        engine.rope.data = memory


@pytest.mark.parametrize("mode", MODES)
def test_modules_can_be_copied_and_pickled_while_they_are_watched(mode: Mode) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    guard = WeightGuard(module.forward, mode=mode)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.load_state_dict(module.state_dict(), assign=True)
        copied[0].weight = weight()
        assert noticed(guard) == ()
    module[0].weight = weight()
    assert noticed(guard) == ("Linear '0'.weight",)


@pytest.mark.parametrize("mode", MODES)
def test_two_guards_on_one_module(mode: Mode) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    first = WeightGuard(module.forward, mode=mode)
    module[0].weight = weight()
    second = WeightGuard(module.forward, mode=mode)
    assert noticed(first)
    assert noticed(second) == ()
    first.close()
    module[0].weight = weight()
    assert (first.stale(), first.num_watched) == ((), 0)
    assert noticed(second) == ("Linear '0'.weight",)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_wrap_others(mode: Mode) -> None:
    wrapper = TwoTensor(torch.ones(3), torch.zeros(3))
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(wrapper)
    module.register_buffer("b", wrapper)
    guard = WeightGuard(lambda: module, mode=mode)
    assert noticed(guard) == ()
    b = module.b.b
    module.b.b = torch.zeros(3)
    assert "Module.b" in noticed(guard)
    module.b.b = b
    assert noticed(guard) == ()
    b.data = torch.zeros(3)
    assert "Module.b" in noticed(guard)
    with torch.no_grad():
        guard = WeightGuard(lambda: module, mode=mode)
        module.b.a.add_(1)
        assert noticed(guard) == ()
    module.b = TwoTensor(module.b.a, module.b.b)
    assert noticed(guard) == (), "the same memory"
    module.b = TwoTensor(torch.ones(3), module.b.b)
    assert noticed(guard) == ("Module.b",)


def strange() -> dict[str, Callable[[], torch.Tensor]]:
    fakes = FakeTensorMode()
    dense = torch.eye(3)
    return {
        "meta": lambda: torch.empty(3, device="meta"),
        "fake": lambda: fakes.from_tensor(torch.ones(3)),
        "sparse": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested, strided": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "empty": lambda: torch.empty(0, 3),
        "lazy": lambda: torch.nn.parameter.UninitializedBuffer(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", strange())
@pytest.mark.filterwarnings("ignore")
def test_tensors_with_no_or_strange_memory(kind: str, mode: Mode) -> None:
    make = strange()[kind]
    module, other = torch.nn.Module(), make()
    module.register_buffer("b", make())
    guard = WeightGuard(lambda: module, seen=[other], mode=mode)
    assert noticed(guard) == ()
    old, module.b = module.b, make()
    assert noticed(guard) == (() if kind in ("empty", "lazy") else ("Module.b",))
    module.b = old
    assert noticed(guard) == ()
    module.b = None
    assert noticed(guard) == ("Module.b",)


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_without_memory_that_becomes_another_in_place(mode: Mode) -> None:
    meta, lazy = torch.empty(3, device="meta"), torch.nn.LazyLinear(2)
    guard = WeightGuard(lazy.forward, watch={"meta": meta}, mode=mode)
    assert noticed(guard) == ()
    meta.data = torch.empty(4, device="meta")
    assert noticed(guard) == ("meta",)
    lazy.weight.materialize((2, 3))
    assert set(noticed(guard)) == {"meta", "LazyLinear.weight"}


def test_what_cannot_be_is_refused() -> None:
    for options in ({"mode": "never"}, {"slice_size": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            WeightGuard(len, **options)  # type: ignore[arg-type]


def test_the_error_names_what_is_stale() -> None:
    error = pickle.loads(pickle.dumps(mmgraph.errors.StaleWeights("replaced", ("a", "b"))))
    assert (error.names, str(error)) == (("a", "b"), "replaced")
    assert isinstance(error, RuntimeError)


STEPS = st.tuples(
    st.sampled_from(["write", "replace", "alias", "put back", "data", "data back", "call", "load"]),
    st.integers(0, 3),
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEPS, max_size=25), mode=st.sampled_from(MODES), slice_size=st.integers(1, 9))
def test_any_sequence_of_writes_and_replacements(steps: list[Any], mode: Mode, slice_size: int) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(4)))
    originals = [layer.weight for layer in module]
    memory = [original.data for original in originals]
    # The model: what is bound in each layer is fresh if it lies where the original lay.
    addresses = [data.data_ptr() for data in memory]
    guard = WeightGuard(module.forward, mode=mode, slice_size=slice_size)
    for action, index in steps:
        layer: Any = module[index]
        if action == "write":
            layer.weight.data.add_(1)
        elif action == "load":
            module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
        elif action == "replace":
            layer._parameters["weight"] = weight(2, 2)
        elif action == "alias":
            layer._parameters["weight"] = torch.nn.Parameter(memory[index])
        elif action == "put back":
            layer.weight = originals[index]
        elif action == "data":
            layer.weight.data = torch.ones(2, 2)
        elif action == "data back":
            layer.weight.data = memory[index]
        elif action == "call":
            guard.stale()
            continue
        moved = (i for i, each in enumerate(module) if each.weight.data_ptr() != addresses[i])
        assert set(noticed(guard, slice_size)) == {f"Linear '{i}'.weight" for i in moved}
