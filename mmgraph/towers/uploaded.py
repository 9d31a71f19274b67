"""What was uploaded for a batch's grids, kept for the next batch with the same: one size of images is the usual case.

Promises: what is kept is handed out on the stream that it was uploaded on, so that nothing is read before it is there
or after its memory is another's; it is bounded in bytes; any thread may ask. Those who get it must not write to it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mmgraph.towers.grid_lists import Grid

__all__ = ["UploadCache"]

Made = dict[str, Any]
_Key = tuple[tuple[Grid, ...], torch.device, int]


class UploadCache:
    """The least recently used give way.

    Args:
        max_bytes: A bound on the kept tensors; what is larger than a quarter of it isn't kept.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[Made, int]] = OrderedDict()
        self._nbytes = [0]  # in a list: a capture puts back the plain attributes of what its function can reach

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._nbytes[0]

    def get(
        self, grids: tuple[Grid, ...], device: torch.device, make: Callable[[tuple[Grid, ...]], Made]
    ) -> Made:
        """What was made for these grids on this stream, or is made now.

        Args:
            grids: The grids.
            device: Where it is.
            make: Makes it.
        """
        stream = 0
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            stream = current.cuda_stream
            if stream and current.stream_id == stream:  # not PyTorch's: it may end, and its handle be another's
                return make(grids)
        key = (grids, device, stream)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return dict(found[0])
        made = make(grids)
        nbytes = sum(x.numel() * x.element_size() for x in made.values() if isinstance(x, torch.Tensor))
        with self._lock:
            if nbytes <= self.max_bytes // 4 and key not in self._kept:
                self._kept[key] = dict(made), nbytes
                self._nbytes[0] += nbytes
                while self._nbytes[0] > self.max_bytes:
                    _, (_, gone) = self._kept.popitem(last=False)
                    self._nbytes[0] -= gone
        return made

    def clear(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._kept.clear()
            self._nbytes[0] = 0
