"""The batch of requests: photos as patches, prompts with placeholders, and the schedule of prefill steps.

Everything here is host data that a seed decides. The batch always holds, as far as it is long enough: one photo
in two requests, a request without any photo, and a prompt longer than a prefill step whose chunk boundary lies
in its photo.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmgraph.serving.errors import RequestError
from mmgraph.serving.model import ImageLimits
from mmgraph.serving.photos import Photo
from mmgraph.serving.positions import Ints, prompt_positions
from mmgraph.towers.grids import Grid

_DETAIL = (0.5, 1.0, 0.25)
"""Share of the largest pixel number that successive photos may have, so that sizes differ. The first photo, which is
used twice, has half, so that both uses fit into one prefill step."""


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """A photo as the tower takes it.

    Attributes:
        name: The photo's file name.
        source: The package or folder that it came from.
        grid: Frames, rows and columns of patches.
        patches: float32 ``[patches, patch_dim]`` on the host.
        tokens: Placeholders that it takes in a prompt.
    """

    name: str
    source: str
    grid: Grid
    patches: Tensor
    tokens: int


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt.

    Attributes:
        kind: What it is there for, in a few words.
        ids: The prompt's token ids, with the model's own image placeholder.
        images: Each image with its first placeholder's place.
        positions: int64 ``[3, len(ids)]``, rotary positions.
    """

    kind: str
    ids: tuple[int, ...]
    images: tuple[tuple[int, PreparedImage], ...]
    positions: Ints

    @property
    def next_position(self) -> int:
        """The rotary position of the first token after the prompt."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt in one prefill step: ``count`` tokens after the first ``prefix``."""

    request: int
    prefix: int
    count: int


def prepare_images(photos: Sequence[Photo], processor: Any, limits: ImageLimits) -> list[PreparedImage]:
    """Resize, normalise and cut photos with transformers' processor; sizes differ from photo to photo.

    Args:
        photos: The photos.
        processor: As `model.image_processor` makes it.
        limits: The smallest and largest number of pixels.

    Returns:
        One prepared image for each photo. One that can't be cut into patches (a ribbon, say) is a warning.

    Raises:
        RequestError: No photo is left.
    """
    prepared = []
    for number, photo in enumerate(photos):
        most = max(limits.min_pixels, int(limits.max_pixels * _DETAIL[number % len(_DETAIL)]))
        size = {"shortest_edge": limits.min_pixels, "longest_edge": most}
        try:
            result = processor(
                images=[photo.pixels], size=size, input_data_format="channels_last", return_tensors="np"
            )
        except ValueError as error:
            warnings.warn(f"{photo.name!r} can't be made into patches ({error}); passed over", stacklevel=2)
            continue
        frames, height, width = (int(n) for n in result["image_grid_thw"][0])
        patches = torch.from_numpy(np.ascontiguousarray(result["pixel_values"], dtype=np.float32))
        tokens = frames * height * width // processor.merge_size**2
        prepared.append(PreparedImage(photo.name, photo.source, (frames, height, width), patches, tokens))
    if not prepared:
        raise RequestError(
            f"none of {len(photos)} photo(s) can be made into patches: give at least one that can"
        )
    return prepared


def build_requests(
    images: Sequence[PreparedImage], config: Any, *, count: int, budget: int, seed: int
) -> list[Request]:
    """The batch of requests.

    Args:
        images: At least one; the first is the one used twice, the second goes into the long prompt.
        config: The model's configuration: token ids and merge size.
        count: How many requests, at least 1.
        budget: Tokens of a prefill step; the long prompt is longer.
        seed: Decides the text tokens and their number.

    Raises:
        RequestError: ``count`` is below 1, or there is no image.
    """
    if count < 1:
        raise RequestError(f"--requests must be at least 1, got {count}")
    if not images:
        raise RequestError("the batch needs at least one image")
    rng = np.random.default_rng(seed)
    author = _Author(config, rng)
    once, other = images[0], images[1 % len(images)]
    rest = itertools.cycle(images[2:] or images)
    requests: list[Request] = []
    for number in range(count):
        match number:
            case 0:
                requests.append(author.write("photo", [9, once, 14]))
            case 1:
                requests.append(author.write("the same photo again", [22, once, 5]))
            case 2:
                requests.append(author.write("text only", [37]))
            case 3:
                # Vision start takes one place; half of the photo's placeholders end the first chunk.
                lead = max(1, budget - other.tokens // 2 - 1)
                requests.append(author.write("longer than a step", [lead, other, 11]))
            case _:
                lead = int(rng.integers(3, 30))
                if number % 2 == 0:
                    requests.append(author.write("two photos", [lead, next(rest), 6, next(rest), 8]))
                else:
                    requests.append(author.write("photo", [lead, next(rest), 12]))
    return requests


def schedule(lengths: Sequence[int], budget: int) -> list[list[Chunk]]:
    """Prefill steps of at most ``budget`` tokens, in the order of the requests.

    A prompt that doesn't fit into what is left of a step begins the next one; only one longer than a whole step
    is cut.

    Args:
        lengths: Tokens of each prompt, each at least 1.
        budget: Tokens of a step, at least 1.
    """
    steps: list[list[Chunk]] = []
    room = 0
    for request, length in enumerate(lengths):
        done = 0
        while done < length:
            left = length - done
            if room == 0 or (done == 0 and left > room):
                steps.append([])
                room = budget
            count = min(left, room)
            steps[-1].append(Chunk(request, done, count))
            done += count
            room -= count
    return steps


class _Author:
    """Writes prompts of random text and images."""

    def __init__(self, config: Any, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        special = (
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        )
        self._words = min(*special, config.text_config.vocab_size)

    def write(self, kind: str, parts: Sequence[int | PreparedImage]) -> Request:
        """A request from parts: a number stands for so many random text tokens."""
        ids: list[int] = []
        images: list[tuple[int, PreparedImage]] = []
        for part in parts:
            if isinstance(part, int):
                ids += [int(i) for i in self._rng.integers(0, self._words, part)]
                continue
            ids.append(self._config.vision_start_token_id)
            images.append((len(ids), part))
            ids += [self._config.image_token_id] * part.tokens
            ids.append(self._config.vision_end_token_id)
        places = [(start, image.grid) for start, image in images]
        merge = self._config.vision_config.spatial_merge_size
        return Request(kind, tuple(ids), tuple(images), prompt_positions(len(ids), places, merge))
