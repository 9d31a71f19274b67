"""One call of a function that scatters rows, as a small frozen record: what it is given and what must come out.

Promises: a record's ``repr`` is Python code that makes it again; equal records give equal tensors on every device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmgraph.testing.contents import coded_rows, coded_sources
from mmgraph.testing.origins import Origin, SourceRange, map_origins, mask_origins, range_origins

Inputs = Mapping[str, Sequence[torch.Tensor]]
"""The differentiable tensors of a call, by the kind of `Origin`."""


class ScatterCase(Protocol):
    """What the three kinds of case have in common."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""

    @property
    def width(self) -> int:
        """Columns of every row."""

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """Make the arguments of the call anew."""

    def inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        """Name the floating-point tensors among the arguments."""

    def origins(self) -> list[Origin]:
        """Say which row each output row must take."""


@dataclass(frozen=True, kw_only=True)
class RangesCase:
    """A call of ``fn(input_ids, table, sources, ranges)``.

    Attributes:
        ids: The token ids.
        vocabulary: Rows of the table.
        width: Columns.
        sources: Rows of each source; may be 0.
        ranges: Where they go.
        dtype: Of the table and the result.
        source_dtypes: Of each source.
        id_dtype: torch.int32 or torch.int64.
        strided: Table and sources are columns of wider matrices.
        seed: Of the contents.
    """

    ids: tuple[int, ...]
    vocabulary: int
    width: int
    sources: tuple[int, ...]
    ranges: tuple[SourceRange, ...]
    dtype: torch.dtype = torch.float32
    source_dtypes: tuple[torch.dtype, ...]
    id_dtype: torch.dtype = torch.int64
    strided: bool = False
    seed: int = 0

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """Make the arguments.

        Returns:
            ``input_ids`` ``[T]``, ``table`` ``[V, H]``, a list of sources ``[n_i, H]``, a list of ranges.
        """
        sources = coded_sources(
            zip(self.sources, self.source_dtypes, strict=True),
            self.width,
            seed=self.seed,
            device=device,
            strided=self.strided,
        )
        return _ids(self, device), _table(self, device), sources, list(self.ranges)

    def inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        """Name the floating-point tensors among the arguments."""
        return {"text": [arguments[1]], "source": arguments[2]}

    def origins(self) -> list[Origin]:
        """Say which row each output row must take."""
        return range_origins(self.ids, self.vocabulary, self.ranges)


@dataclass(frozen=True, kw_only=True)
class MapCase:
    """A call of ``fn(input_ids, table, pool, row_map)``.

    Attributes:
        ids: The token ids.
        vocabulary: Rows of the table.
        width: Columns.
        pool: Rows of the pool; may be 0.
        row_map: For each output row the pool's row, or -1.
        dtype: Of the table and the result.
        pool_dtype: Of the pool.
        id_dtype: torch.int32 or torch.int64.
        strided: Table and pool are columns of wider matrices.
        seed: Of the contents.
    """

    ids: tuple[int, ...]
    vocabulary: int
    width: int
    pool: int
    row_map: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int64
    strided: bool = False
    seed: int = 0

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """Make the arguments.

        Returns:
            ``input_ids`` ``[T]``, ``table`` ``[V, H]``, ``pool`` ``[R, H]``, ``row_map`` int32 ``[T]``.
        """
        pool = coded_rows(
            1,
            self.pool,
            self.width,
            seed=self.seed,
            dtype=self.pool_dtype,
            device=device,
            strided=self.strided,
        )
        row_map = torch.tensor(self.row_map, dtype=torch.int32, device=device)
        return _ids(self, device), _table(self, device), pool, row_map

    def inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        """Name the floating-point tensors among the arguments."""
        return {"text": [arguments[1]], "pool": [arguments[2]]}

    def origins(self) -> list[Origin]:
        """Say which row each output row must take."""
        return map_origins(self.ids, self.vocabulary, self.row_map)


@dataclass(frozen=True, kw_only=True)
class MaskCase:
    """A call of ``fn(embeds, mask, features)``.

    Attributes:
        mask: For each output row whether it takes the next feature row.
        width: Columns.
        dtype: Of ``embeds`` and the result.
        feature_dtype: Of the features.
        strided: Embeddings and features are columns of wider matrices.
        seed: Of the contents.
    """

    mask: tuple[bool, ...]
    width: int
    dtype: torch.dtype = torch.float32
    feature_dtype: torch.dtype = torch.float32
    strided: bool = False
    seed: int = 0

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """Make the arguments.

        Returns:
            ``embeds`` ``[T, H]``, ``mask`` bool ``[T]``, ``features`` ``[n, H]``.
        """

        def rows(first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
            return coded_rows(
                first, count, self.width, seed=self.seed, dtype=dtype, device=device, strided=self.strided
            )

        embeds = rows(-1, len(self.mask), self.dtype)
        mask = torch.tensor(self.mask, dtype=torch.bool, device=device)
        return embeds, mask, rows(1, sum(self.mask), self.feature_dtype)

    def inputs(self, arguments: tuple[Any, ...]) -> Inputs:
        """Name the floating-point tensors among the arguments."""
        return {"embeds": [arguments[0]], "features": [arguments[2]]}

    def origins(self) -> list[Origin]:
        """Say which row each output row must take."""
        return mask_origins(self.mask)


def _ids(case: RangesCase | MapCase, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(case.ids, dtype=case.id_dtype, device=device)


def _table(case: RangesCase | MapCase, device: torch.device | str) -> torch.Tensor:
    return coded_rows(
        -1,
        case.vocabulary,
        case.width,
        seed=case.seed,
        dtype=case.dtype,
        device=device,
        strided=case.strided,
    )
