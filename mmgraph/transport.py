"""Handles that carry a feature's tensors from one process to others through shared memory.

Promises: a handle is small and pickles any number of times, and every copy of it is unattached; the data outlives
the producer and any of the consumers until one consumes or releases it; each consumer that has attached gets the
data, whoever removes the segment first; an error leaves a handle as it was. Imports no torch until a tensor is
published or read.

The life of a segment: ``publish`` (the producer makes and fills it, keeping nothing open) -> the handle travels ->
``attach`` (in every consumer, before any of them consumes) -> ``consume`` (copies out, then removes the segment) or
``release`` (removes it unread). Who owns it meanwhile, and what `sweep` may remove, is told in
``mmgraph.transport_segments``.
"""

import enum
from typing import Any, Self

from mmgraph.errors import HandleStateError
from mmgraph.transport_files import own
from mmgraph.transport_layout import Layout, TensorPlace, dtype_of, map_places, read_tensor
from mmgraph.transport_segments import OpenSegment, SegmentRef, open_segment, unlink_segment, write_segment
from mmgraph.transport_segments import release_published as release_published
from mmgraph.transport_segments import sweep as sweep


class _State(enum.Enum):
    UNATTACHED = "not attached"
    ATTACHED = "attached"
    CONSUMING = "being consumed"
    CONSUMED = "consumed"
    RELEASED = "released"


class ShmTensorHandle:
    """A feature in shared memory, published by one process and consumed by others. A `FeatureHandle`.

    Made by `publish`. Pickled, copied and deep-copied handles are unattached, whatever the original is; so is the
    copy that a fork inherits. All methods may be called from any thread.
    """

    __slots__ = ("__weakref__", "_is_read", "_ref", "_segment", "_state", "_tree")

    def __init__(self, ref: SegmentRef, tree: Any) -> None:
        self._ref = ref
        self._tree = tree
        self._segment: OpenSegment | None = None
        self._state = _State.UNATTACHED
        # Apart from the state, which a release changes while a thread reads on.
        self._is_read = False

    @classmethod
    def publish(cls, feature: Any) -> Self:
        """Copy a feature into a new segment of shared memory.

        Args:
            feature: A tensor of any shape, strides, dtype and device, an array, or lists, tuples and mappings of
                these; numbers, text, bytes and None among them travel in the pickle, enums and other subclasses
                of them as the plain value. A tensor on a device is copied to the host, which waits for the
                device's current stream.

        Returns:
            A handle, not attached. Keep it, or a copy, until the feature has arrived: if the consumers die before,
            ``release()`` is the producer's to call.

        Raises:
            FeatureNotPublishableError: The feature holds something else, or a tensor that isn't dense and with data;
                or it is nested more than 64 deep, as one that holds itself is.
            SharedMemoryFullError: There is no room for it.
            TransportError: The system refuses otherwise. After any error nothing is left.
        """
        layout = Layout(feature)
        return cls(write_segment(layout.nbytes, layout.parts()), layout.tree)

    def attach(self) -> Self:
        """Open the segment, so that nobody's consuming or releasing can take the data away from this process.

        In a group every consumer attaches before any consumes, with a barrier between. Does nothing where the
        handle is attached.

        Returns:
            The handle itself.

        Raises:
            HandleStateError: The handle was consumed or released here.
            SegmentGoneError: The segment isn't there any more.
            SegmentDamagedError: It isn't as it was published.
            TransportError: The system refuses otherwise.
        """
        with own.lock:
            state = self._settled_state()
            if state in (_State.CONSUMED, _State.RELEASED):
                raise self._misuse(
                    "attached",
                    "ends when it is consumed or released: publish the feature again, or use another copy",
                )
            if state is _State.UNATTACHED:
                self._segment = open_segment(self._ref)
                self._state = _State.ATTACHED
        return self

    def consume(self) -> Any:
        """Copy the feature out and remove the segment.

        Returns:
            What was published: tensors on the host, pinned where there is CUDA, contiguous and each with memory of
            its own; arrays as tensors, mappings as dictionaries.

        Raises:
            HandleStateError: The handle isn't attached, or was consumed or released before.
            SegmentDamagedError: The segment was shortened since it was attached.
            TransportError: The system refuses, or the handle isn't as `publish` made it. After any error the handle
                is attached as before.
        """
        segment = self._begin()
        try:
            feature = map_places(
                self._tree, lambda place: read_tensor(place, segment.read_into, self._ref.size)
            )
            unlink_segment(self._ref.name)
        except BaseException:
            self._end(_State.ATTACHED)
            raise
        self._end(_State.CONSUMED)
        return feature

    def release(self) -> None:
        """Remove the segment unread, attached or not; consumers that have attached still get the data.

        Does nothing where the handle was consumed or released, or where the segment is gone.

        Raises:
            TransportError: The system refuses.
        """
        if self._state in (_State.CONSUMED, _State.RELEASED):
            return
        unlink_segment(self._ref.name)
        with own.lock:
            if self._settled_state() is not _State.CONSUMED:
                self._state = _State.RELEASED
            if not self._is_read:  # the thread that reads it closes it
                self._close()

    @property
    def shape(self) -> Any:
        """The tensor's shape; of a nested feature, the same structure of shapes, None for plain values."""
        return map_places(self._tree, lambda place: place.shape, lambda _: None)

    @property
    def dtype(self) -> Any:
        """The tensor's torch dtype; of a nested feature, the same structure of dtypes, None for plain values."""
        return map_places(self._tree, dtype_of, lambda _: None)

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; in nested features with gaps, since each tensor begins at a multiple of 64."""
        return self._ref.size

    @property
    def name(self) -> str:
        """The segment's file name below ``/dev/shm``."""
        return self._ref.name

    @property
    def is_attached(self) -> bool:
        """Whether this handle has the segment open in this process."""
        with own.lock:
            return self._settled_state() in (_State.ATTACHED, _State.CONSUMING)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._ref, self._tree))

    def __repr__(self) -> str:
        with own.lock:
            state = self._settled_state().value
        if isinstance(self._tree, TensorPlace):
            what = f"torch.{self._tree.dtype} {list(self._tree.shape)}"
        else:
            places: list[TensorPlace] = []
            map_places(self._tree, places.append)
            what = f"{len(places)} tensor{'' if len(places) == 1 else 's'} in a {type(self._tree).__name__}"
        return f"ShmTensorHandle({what}, {self.nbytes} bytes, {self.name}, {state})"

    def _settled_state(self) -> _State:
        """Give the state; a fork's copy is not attached, whatever its parent's was."""
        if self._segment is not None and not self._segment.is_open:
            self._segment = None
            self._is_read = False
            if self._state in (_State.ATTACHED, _State.CONSUMING):
                self._state = _State.UNATTACHED
        return self._state

    def _begin(self) -> OpenSegment:
        with own.lock:
            state = self._settled_state()
            if state is _State.UNATTACHED:
                raise self._misuse(
                    "consumed",
                    "must be attached in this process first: call attach(), in a group before its barrier",
                )
            if state is not _State.ATTACHED or self._segment is None:
                raise self._misuse(
                    "consumed",
                    "gives its feature once: keep what consume() returned, or publish the feature again",
                )
            self._state = _State.CONSUMING
            self._is_read = True
            return self._segment

    def _end(self, state: _State) -> None:
        with own.lock:
            self._is_read = False
            if self._state is _State.CONSUMING:
                self._state = state
            if self._state is not _State.ATTACHED:
                self._close()

    def _close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _misuse(self, verb: str, rule: str) -> HandleStateError:
        return HandleStateError(f"{self!r} can't be {verb}: a handle {rule}")
