"""The kinds of media. Imports nothing, so that every other module can name them."""

import enum


class Modality(enum.Enum):
    """A kind of media; each has encoders and placeholder ids of its own."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    # Members are compared by identity; enum's own hash is Python code, and plans hash one for each item.
    __hash__ = object.__hash__
