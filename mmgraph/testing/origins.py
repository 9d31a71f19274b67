"""Which row each output row takes, said in words a message can use.

Promises: plain Python, one output row at a time, the later of two overlapping ranges wins; nothing of the planner's or
of the ops' code is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "source", "pool", "embeds", "features"]


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A run of output rows that are copied from a source; both ends are inclusive.

    Attributes:
        dst_start: First output row.
        dst_end: Last output row.
        source: Index of the source.
        src_start: The source's row that ``dst_start`` takes; the next rows follow it.
    """

    dst_start: int
    dst_end: int
    source: int
    src_start: int


@dataclass(frozen=True, slots=True)
class Origin:
    """A row of an input, as the one that an output row takes.

    Attributes:
        kind: "text" (a row of the table), "source", "pool", "embeds" or "features".
        row: The row there; for "text", the id after clamping.
        source: The source's index, where there are several.
    """

    kind: Kind
    row: int
    source: int = 0

    def __str__(self) -> str:
        if self.kind == "text":
            return f"the text row of id {self.row}"
        return (
            f"source {self.source} row {self.row}" if self.kind == "source" else f"{self.kind} row {self.row}"
        )


def text_origin(token: int, vocabulary: int) -> Origin:
    """Give the text row of an id: negative ids take the first row, ids that are too large the last."""
    if token < 0:
        return Origin("text", 0)
    if token >= vocabulary:
        return Origin("text", vocabulary - 1)
    return Origin("text", token)


def range_origins(ids: Sequence[int], vocabulary: int, ranges: Sequence[SourceRange]) -> list[Origin]:
    """Give the origin of each row where ranges of sources go over text rows, in order."""
    origins = [text_origin(token, vocabulary) for token in ids]
    for entry in ranges:
        for row in range(entry.dst_start, entry.dst_end + 1):
            origins[row] = Origin("source", entry.src_start + row - entry.dst_start, entry.source)
    return origins


def map_origins(ids: Sequence[int], vocabulary: int, row_map: Sequence[int]) -> list[Origin]:
    """Give the origin of each row where a map names a pool's row, or -1 for the text row."""
    return [
        text_origin(token, vocabulary) if place < 0 else Origin("pool", place)
        for token, place in zip(ids, row_map, strict=True)
    ]


def mask_origins(mask: Sequence[bool]) -> list[Origin]:
    """Give the origin of each row where the n-th true entry takes the n-th feature row."""
    origins = []
    used = 0
    for row, covered in enumerate(mask):
        if covered:
            origins.append(Origin("features", used))
            used += 1
        else:
            origins.append(Origin("embeds", row))
    return origins
