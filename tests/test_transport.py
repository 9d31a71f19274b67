"""Invariant: what comes out of a handle is what was published, once for each copy that was attached in time.

Every misuse is an error that says what to do and leaves the handle as it was; nothing stays in shared memory.
"""

import copy
import dataclasses
import enum
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, image_encoder, one_request, simple_item
from shm import Fork, fork, names, open_in_here, own_directory, segments

import mmgraph
from mmgraph import MultimodalEmbedder, ShmTensorHandle, transport, transport_layout
from mmgraph.errors import (
    FeatureError,
    FeatureNotPublishableError,
    HandleStateError,
    SegmentDamagedError,
    SegmentGoneError,
    TransportError,
)
from mmgraph.items import FeatureHandle
from mmgraph.transport_segments import OpenSegment, SegmentRef

DTYPES = sorted(
    {
        found
        for found in vars(torch).values()
        if isinstance(found, torch.dtype) and not str(found).startswith("torch.q")
    },
    key=str,
)
same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_directory(monkeypatch) as directory:
        yield directory


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in rows."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, tensor.dtype)
    return tensor.detach().resolve_conj().resolve_neg().view(word).numpy().tobytes()


def through(feature: Any) -> Any:
    """Publish, pickle, attach and consume."""
    return pickle.loads(pickle.dumps(ShmTensorHandle.publish(feature))).attach().consume()


def same(got: Any, wanted: torch.Tensor) -> bool:
    return (
        type(got) is torch.Tensor
        and (got.dtype, got.shape, got.device.type) == (wanted.dtype, wanted.shape, "cpu")
        and got.is_contiguous()
        and not got.requires_grad
        and raw(got) == raw(wanted)
    )


# What comes out


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
        tensor = torch.from_numpy(data).view(dtype).reshape(shape)
    view = draw(st.sampled_from(["whole", "turned", "cut", "spread", "conjugate"]))
    if view == "turned":
        tensor = tensor.permute(list(reversed(range(tensor.dim()))))
    if view == "cut" and tensor.dim():
        tensor = tensor[shape[0] // 2 :: 2]
    if view == "spread":
        tensor = tensor.expand(1 + seed % 3, *tensor.shape)
    if view == "conjugate" and dtype in (torch.complex64, torch.complex128):
        tensor = tensor.conj() if seed % 2 else tensor.conj().imag
    return tensor


@same_directory
@given(tensor=tensors())
def test_a_tensor_comes_out_as_it_was(shm: Path, tensor: torch.Tensor) -> None:
    handle = ShmTensorHandle.publish(tensor)
    assert (handle.shape, handle.dtype, handle.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
    assert same(handle.attach().consume(), tensor)
    assert segments(shm) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_every_dtype(shm: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        data = torch.arange(1, count + 1, dtype=torch.uint8).clamp_(max=1 if dtype == torch.bool else 255)
        tensor = data.view(dtype).reshape(shape)
    assert same(through(tensor), tensor)


leaves = st.one_of(
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
)
features = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 9)), parts, max_size=3),
    ),
    max_leaves=8,
)


def equal(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return same(got, wanted)
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(map(equal, got, wanted))
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(equal(got[key], wanted[key]) for key in wanted)
    return bool(got == wanted)


def spans_of(tree: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    transport_layout.map_places(tree, lambda place: found.append((place.offset, place.offset + place.nbytes)))
    return found


@same_directory
@given(feature=features, tensor=tensors())
def test_a_nested_feature_comes_out_of_one_segment_as_it_was(
    shm: Path, feature: Any, tensor: torch.Tensor
) -> None:
    handle = ShmTensorHandle.publish([feature, tensor])
    assert segments(shm) == [handle.name]
    spans = spans_of(handle._tree)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] == handle.nbytes
    assert equal(pickle.loads(pickle.dumps(handle)).attach().consume(), [feature, tensor])
    assert segments(shm) == []


def test_shape_and_dtype_follow_the_structure(shm: Path) -> None:
    handle = ShmTensorHandle.publish({"a": [torch.zeros(2, 3).half()], "n": 4, "t": (np.zeros(0, "i2"), None)})
    assert handle.shape == {"a": [(2, 3)], "n": None, "t": ((0,), None)}
    assert handle.dtype == {"a": [torch.float16], "n": None, "t": (torch.int16, None)}
    assert repr(handle) == f"ShmTensorHandle(2 tensors in a dict, 64 bytes, {handle.name}, not attached)"
    handle.release()


def test_each_tensor_has_memory_of_its_own(shm: Path) -> None:
    first, second = through([torch.zeros(3), torch.ones(3)])
    assert first.untyped_storage().nbytes() == 12
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    first.fill_(7)
    assert second.tolist() == [1, 1, 1]


ARRAYS = {
    "read-only": np.frombuffer(bytes(range(12)), np.uint8).reshape(3, 4),
    "turned round": np.arange(12.0)[::-2],
    "other byte order": np.arange(5, dtype=">i4"),
    "columns first": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "no dimension": np.array(2.5),
    "empty": np.zeros((0, 3), np.complex64),
    "bool": np.array([True, False]),
    "half": np.arange(3, dtype=np.float16),
    "unsigned": np.arange(3, dtype=np.uint16),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_come_out_as_tensors(shm: Path, array: Any) -> None:
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    assert same(through(array), torch.from_numpy(native))


def test_mappings_and_numpy_scalars(shm: Path) -> None:
    tensor = torch.ones(2)
    feature = UserDict({"a": OrderedDict(x=tensor), "b": np.float32(3)})
    assert equal(through(feature), {"a": {"x": tensor}, "b": np.float32(3)})


def test_gradients_and_parameters_stay_behind(shm: Path) -> None:
    for tensor in (
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3).requires_grad_() * 2,
    ):
        assert same(through(tensor), tensor)
        assert tensor.requires_grad


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_modes_of_torch_have_no_say(shm: Path, mode: Callable[[], Any]) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    with mode():
        assert same(through(tensor), tensor)


def test_pinned_where_there_is_cuda(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = torch.empty, []

    def unpinned(*args: Any, pin_memory: bool, **fields: Any) -> torch.Tensor:
        asked.append((pin_memory, fields.get("device")))
        return empty(*args, **fields)

    monkeypatch.setattr(torch, "empty", unpinned)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert same(through(torch.arange(3)), torch.arange(3))
    assert asked == [(True, "cpu"), (False, "cpu")]


@pytest.mark.cuda
def test_from_a_device_into_pinned_memory(shm: Path) -> None:
    tensor = torch.randn(5, 7, device="cuda", dtype=torch.bfloat16)
    got = through({"x": tensor.t(), "y": tensor[0, 0]})
    assert got["x"].is_pinned()
    assert same(got["x"], tensor.t().cpu())
    assert same(got["y"], tensor[0, 0].cpu())


# What can't be published

Pair = namedtuple("Pair", ["a", "b"])


class Special(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ([1, {torch.ones(1)}], r"feature\[1\].*got builtins.set"),
    "a named tuple": ({"p": Pair(torch.ones(1), 2)}, r"feature\['p'\].*Pair"),
    "objects": (np.array([object()]), "dtype that tensors have, got object"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    "long doubles": (np.zeros(2, np.longdouble), "dtype that tensors have"),
    "a masked array": (np.ma.masked_array([1.0], [True]), "MaskedArray"),
    "sparse": (torch.eye(3).to_sparse(), "sparse_coo"),
    "meta": ([torch.ones(2, device="meta")], r"feature\[0\].*got meta"),
    "a subclass": (torch.ones(2).as_subclass(Special), "plain tensor, got one of type Special"),
    "no tensor": ({"a": 1}, "must hold a tensor or an array, got dict without any"),
    "nothing": (None, "must hold a tensor"),
    "a key": ({(1, 2): torch.ones(1)}, "keys that are plain values, got one of type tuple"),
    "a handle": ([torch.ones(1), object()], r"feature\[1\].*builtins.object"),
}


@pytest.mark.parametrize(("feature", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cant_come_back_is_refused(shm: Path, feature: Any, message: str) -> None:
    with pytest.raises(FeatureNotPublishableError, match=message):
        ShmTensorHandle.publish(feature)
    assert names(shm) == []


def nested(depth: int) -> Any:
    feature: Any = torch.ones(1)
    for turn in range(depth):
        feature = ([feature], (feature,), {"x": feature})[turn % 3]
    return feature


def test_features_are_64_deep_at_most(shm: Path) -> None:
    assert equal(through(nested(64)), nested(64))
    copy.deepcopy(ShmTensorHandle.publish(nested(64))).release()
    own_list: list[Any] = [torch.ones(1)]
    own_list.append(own_list)
    own_dict: dict[str, Any] = {}
    own_dict["x"] = (own_dict,)
    left = names(shm)
    for feature in (nested(65), nested(5000), own_list, own_dict):
        with pytest.raises(
            FeatureNotPublishableError, match=r"at most 64 deep, got a \w+ that is deeper; does it"
        ):
            ShmTensorHandle.publish(feature)
    assert names(shm) == left


def test_subclasses_of_plain_values_come_out_plain(shm: Path) -> None:
    class Number(enum.IntEnum):  # here, so that it can't be pickled
        ONE = 1

    class Word(enum.StrEnum):
        HEAT = "heat"

    class Real(float):
        def __float__(self) -> float:
            return 0.0

    class Wave(complex):
        pass

    class Data(bytes):
        pass

    class Wide(np.float64):
        pass

    tensor = torch.ones(2)
    feature = [
        Number.ONE,
        {Word.HEAT: tensor},
        Real(2.5),
        Wave(1j),
        Data(b"x"),
        Wide(3),
        True,
        np.int8(4),
        np.str_("y"),
    ]
    assert equal(through(feature), [1, {"heat": tensor}, 2.5, 1j, b"x", 3.0, True, np.int8(4), np.str_("y")])


def test_keys_that_become_one_are_refused(shm: Path) -> None:
    class Apart(str):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other

    with pytest.raises(FeatureNotPublishableError, match="keys that differ as plain values, got 'a' twice"):
        ShmTensorHandle.publish({"a": torch.ones(1), Apart("a"): 2})
    assert names(shm) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_nested_tensors_are_refused(shm: Path) -> None:
    for tensor in (
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        with pytest.raises(FeatureNotPublishableError, match="dense tensor with data"):
            ShmTensorHandle.publish(tensor)


def test_a_dtype_of_another_torch(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.ones(2))
    place = handle._tree
    handle._tree = type(place)("float3", place.shape, place.offset, place.nbytes)
    with pytest.raises(TransportError, match=r"dtype float3, which torch .* doesn't have; run one version"):
        handle.attach().consume()
    assert handle.is_attached


# The life of a handle


def test_it_is_a_feature_handle(shm: Path) -> None:
    assert isinstance(ShmTensorHandle.publish(torch.ones(1)), FeatureHandle)
    assert mmgraph.transport.sweep is transport.sweep


def test_consume_without_attach_is_an_error_and_no_end(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    with pytest.raises(HandleStateError, match=r"not attached.* can't be consumed: .*call attach"):
        handle.consume()
    assert not handle.is_attached
    assert handle.attach().consume().tolist() == [0, 1, 2]


def test_a_second_consume_is_an_error(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()
    handle.consume()
    for call in (handle.consume, handle.attach):
        with pytest.raises(HandleStateError, match="consumed\\) can't be"):
            call()
    assert not handle.is_attached
    handle.release()
    handle.release()
    assert segments(shm) == []


def test_attach_gives_the_handle_itself_and_opens_once(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    assert handle.attach() is handle
    before = open_in_here(shm)
    assert handle.attach() is handle
    assert handle.is_attached
    assert open_in_here(shm) == before
    assert repr(handle).endswith(f"(torch.int64 [3], 24 bytes, {handle.name}, attached)")
    handle.release()
    assert len(open_in_here(shm)) == 1


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("gone", [False, True])
def test_release_from_any_state_any_number_of_times(shm: Path, attached: bool, gone: bool) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    if attached:
        handle.attach()
    if gone:
        (shm / handle.name).unlink()
    for _ in range(3):
        handle.release()
        assert segments(shm) == []
        assert not handle.is_attached
        assert len(open_in_here(shm)) == 1
    for call in (handle.attach, handle.consume):
        with pytest.raises(HandleStateError, match="released\\) can't be"):
            call()


def test_attach_after_the_end_says_that_it_is_gone(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    late = copy.copy(handle)
    handle.release()
    for _ in range(2):
        with pytest.raises(SegmentGoneError, match="barrier"):
            late.attach()
    assert not late.is_attached
    late.release()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))]
)
@pytest.mark.parametrize("state", ["new", "attached", "consumed", "released"])
def test_copies_are_unattached_handles_of_the_same_segment(
    shm: Path, copied: Callable[[ShmTensorHandle], ShmTensorHandle], state: str
) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    keeper = copy.copy(handle).attach()
    if state != "new":
        handle.attach()
    if state == "consumed":
        handle.consume()
    if state == "released":
        handle.release()
    other = copied(copied(handle))
    assert not other.is_attached
    assert other.name == handle.name
    if state in ("new", "attached"):
        assert other.attach().consume().tolist() == [0, 1, 2]
        assert handle.is_attached == (state == "attached")
    else:
        with pytest.raises(SegmentGoneError):
            other.attach()
    assert keeper.consume().tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(shm: Path, protocol: int) -> None:
    handle = ShmTensorHandle.publish([torch.arange(3), "x"])
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(handle, protocol)), protocol))
    assert equal(again.attach().consume(), [torch.arange(3), "x"])


def test_a_group_each_gets_the_data_whoever_removes_first(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    group = [pickle.loads(pickle.dumps(handle)).attach() for _ in range(4)]
    assert [member.consume().tolist() for member in group] == [[0, 1, 2]] * 4
    assert segments(shm) == []
    assert len(open_in_here(shm)) == 1


def test_a_release_takes_nothing_from_those_that_have_attached(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3))
    member = copy.copy(handle).attach()
    handle.release()
    assert member.consume().tolist() == [0, 1, 2]


def test_a_forged_handle_removes_no_other_file(shm: Path) -> None:
    (shm / "other").touch()
    place = transport_layout.TensorPlace("uint8", (1,), 0, 1)
    handle = ShmTensorHandle(SegmentRef("other", 1, 1), place)
    for call in (handle.attach, handle.release):
        with pytest.raises(TransportError, match="handles are made by publish"):
            call()
    assert names(shm) == ["other"]


@pytest.mark.parametrize("name", [None, 3, b"mmgraph-shm-"], ids=repr)
def test_a_forged_name_is_no_name(shm: Path, name: Any) -> None:
    handle = ShmTensorHandle(SegmentRef(name, 1, 1), transport_layout.TensorPlace("uint8", (1,), 0, 1))
    for call in (handle.attach, handle.release):
        with pytest.raises(TransportError, match="handles are made by publish"):
            call()


@pytest.mark.parametrize(
    "forged",
    [
        {"nbytes": 0},
        {"nbytes": 16},
        {"shape": (200, 3)},
        {"shape": (200, 3), "nbytes": 2400},
        {"shape": (-2, -3)},
        {"shape": (-2, 3), "nbytes": -24},
        {"shape": (2**40, 2**20)},
        {"shape": (2**62, 4), "nbytes": 2**66},
        {"shape": (0, 2**62, 4), "nbytes": 0},
        {"shape": (0, 2**70), "nbytes": 0},
        {"shape": (2.0, 3.0)},
        {"shape": 6},
        {"shape": None},
        {"offset": -8},
        {"offset": 4},
        {"offset": 2**70},
        {"offset": None},
        {"nbytes": None},
        {"dtype": "qint32"},
        {"dtype": "nn"},
        {"dtype": None},
    ],
    ids=repr,
)
def test_a_forged_place_gives_nothing_and_harms_nothing(shm: Path, forged: dict[str, Any]) -> None:
    handle = ShmTensorHandle.publish(torch.arange(6.0).reshape(2, 3))
    bad = ShmTensorHandle(handle._ref, [handle._tree, dataclasses.replace(handle._tree, **forged)]).attach()
    with pytest.raises(TransportError, match=r"handles are made by publish|run one version of torch"):
        bad.consume()
    assert bad.is_attached
    assert same(handle.attach().consume(), torch.arange(6.0).reshape(2, 3))


def test_a_failed_read_leaves_the_handle_attached(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ShmTensorHandle.publish([torch.arange(3), torch.arange(4)]).attach()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.consume()
    assert handle.is_attached
    assert segments(shm) == [handle.name]
    assert equal(handle.consume(), [torch.arange(3), torch.arange(4)])


def test_a_failed_removal_leaves_the_handle_attached(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()

    def refuse(path: str) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        for call in (handle.consume, handle.release):
            with pytest.raises(TransportError, match="can't be removed"):
                call()
    assert handle.is_attached
    assert handle.consume().tolist() == [0, 1, 2]


def test_a_shortened_segment_is_an_error(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(1000)).attach()
    with open(shm / handle.name, "r+b") as file:
        file.truncate(4096)
    with pytest.raises(SegmentDamagedError, match="ended at byte 4096 of 8000"):
        handle.consume()
    with pytest.raises(SegmentDamagedError, match="of 4096 bytes now"):
        copy.copy(handle).attach()
    handle.release()
    assert segments(shm) == []


# Threads and forks


class SlowReader:
    """Lets a test act while a handle is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handle: ShmTensorHandle) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()
        self.results: list[Any] = []
        self.fails = False
        read_into = OpenSegment.read_into

        def slow(segment: OpenSegment, offset: int, buffer: memoryview) -> None:
            self.begun.set()
            assert self.finish.wait(60)
            if self.fails:
                raise RuntimeError("no memory")
            read_into(segment, offset, buffer)

        def run() -> None:
            try:
                self.results.append(handle.consume().tolist())
            except RuntimeError as error:
                self.results.append(str(error))

        monkeypatch.setattr(OpenSegment, "read_into", slow)
        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.begun.wait(60)

    def end(self) -> list[Any]:
        self.finish.set()
        self.thread.join()
        return self.results


def test_one_thread_gets_the_data(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()
    reader = SlowReader(monkeypatch, handle)
    with pytest.raises(HandleStateError, match="being consumed"):
        handle.consume()
    assert handle.attach() is handle
    assert reader.end() == [[0, 1, 2]]
    assert segments(shm) == []
    assert len(open_in_here(shm)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_release_while_another_thread_reads(shm: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()
    reader = SlowReader(monkeypatch, handle)
    reader.fails = fails
    handle.release()
    assert segments(shm) == []
    assert reader.end() == ["no memory" if fails else [0, 1, 2]]
    assert not handle.is_attached
    assert len(open_in_here(shm)) == 1


def test_two_releases_at_once_while_another_thread_reads(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()
    reader = SlowReader(monkeypatch, handle)
    unlink = transport.unlink_segment

    def slow_unlink(name: str) -> None:
        monkeypatch.setattr(transport, "unlink_segment", unlink)
        handle.release()  # as another thread's, that began before this one has ended
        unlink(name)

    monkeypatch.setattr(transport, "unlink_segment", slow_unlink)
    handle.release()
    assert len(open_in_here(shm)) == 2
    assert reader.end() == [[0, 1, 2]]
    assert not handle.is_attached
    assert len(open_in_here(shm)) == 1


def test_many_threads_one_winner(shm: Path) -> None:
    for _ in range(20):
        handle = ShmTensorHandle.publish(torch.arange(500))
        start, won, lost = threading.Barrier(6), [], []

        def run(handle: ShmTensorHandle = handle, start: Any = start, won: Any = won, lost: Any = lost) -> None:
            start.wait()
            try:
                won.append(handle.attach().consume())
            except HandleStateError:
                lost.append(1)

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 5)
        assert same(won[0], torch.arange(500))
    assert segments(shm) == []
    assert len(open_in_here(shm)) == 1


def test_a_forks_copy_is_unattached(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()

    def run(_: Fork) -> None:
        assert not handle.is_attached
        assert open_in_here(shm) == []
        with pytest.raises(HandleStateError, match="not attached"):
            handle.consume()
        assert handle.attach().consume().tolist() == [0, 1, 2]

    assert fork(run) == 0
    assert handle.is_attached
    assert segments(shm) == []
    assert handle.consume().tolist() == [0, 1, 2]


def test_a_fork_while_a_thread_reads(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ShmTensorHandle.publish(torch.arange(3)).attach()
    reader = SlowReader(monkeypatch, handle)

    def run(_: Fork) -> None:
        reader.finish.set()
        assert not handle.is_attached
        assert handle.attach().consume().tolist() == [0, 1, 2]

    assert fork(run) == 0
    assert reader.end() == [[0, 1, 2]]
    assert segments(shm) == []


# Beside the rest


def test_the_embedder_reads_attached_handles_and_gives_up_the_others(shm: Path) -> None:
    rows = torch.randn(2, HIDDEN)
    first, twin = (ShmTensorHandle.publish([rows]).attach(), ShmTensorHandle.publish(rows))
    items = [simple_item([(0, 1)], hash=1, feature=first), simple_item([(3, 4)], hash=1, feature=twin)]
    encoders = image_encoder()
    encode = next(iter(encoders.values())).fn

    def encoder(batch: list[Any]) -> torch.Tensor:
        for item in batch:
            (item.feature,) = item.feature
        return encode(batch)

    object.__setattr__(next(iter(encoders.values())), "fn", encoder)
    embeds, _ = MultimodalEmbedder().apply(
        torch.zeros(5, dtype=torch.int64), torch.zeros(3, HIDDEN), one_request(items, 5), encoders
    )
    assert torch.equal(embeds[[0, 1, 3, 4]], torch.cat([-rows, -rows]))
    assert [item.feature for item in items] == [None, None]
    assert segments(shm) == []


def test_the_embedder_names_an_unattached_handle_and_keeps_it(shm: Path) -> None:
    handle = ShmTensorHandle.publish(torch.randn(2, HIDDEN))
    item = simple_item([(0, 1)], feature=handle)
    with pytest.raises(FeatureError, match=r"handle can't be consumed: HandleStateError: .*call attach\(\)"):
        MultimodalEmbedder().apply(
            torch.zeros(5, dtype=torch.int64), torch.zeros(3, HIDDEN), one_request([item], 5), image_encoder()
        )
    assert item.feature is handle
    assert segments(shm) == [handle.name]


def test_importing_and_forwarding_need_no_torch() -> None:
    program = (
        "import sys, pickle, mmgraph.transport; "
        "pickle.loads(pickle.dumps(mmgraph.transport.ShmTensorHandle("
        "mmgraph.transport.SegmentRef('a', 1, 2), mmgraph.transport.TensorPlace('uint8', (1,), 0, 1)))); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
