"""A forward batch as a small frozen record, from which fresh requests, items and tensors are made.

Promises: a record's ``repr`` is Python code that makes it again; every `BatchCase.build` gives items of their own, so
that one case can be embedded many times, whole or in chunks; items of one modality and hash have the same contents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mmgraph.encoder_spec import EncoderSpec
from mmgraph.inputs import MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.modality import Modality
from mmgraph.testing.contents import coded_rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt.

    Attributes:
        prefix: Prompt positions before it.
        length: Its positions; zero or less for none.
    """

    prefix: int
    length: int


@dataclass(frozen=True, slots=True)
class ItemCase:
    """One media item.

    Attributes:
        modality: Its name, such as "image".
        spans: Inclusive offsets in the prompt; none: the item takes no part.
        hash: None for an item that is never shared.
        precomputed: It comes with rows, which differ from what its encoder would give.
        has_feature: It has a feature; what has to be encoded needs one.
    """

    modality: str
    spans: tuple[tuple[int, int], ...]
    hash: int | None = None
    precomputed: bool = False
    has_feature: bool = True

    @property
    def tokens(self) -> int:
        """The item's rows."""
        return sum(end - start + 1 for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class RequestCase:
    """One request of a batch.

    Attributes:
        items: Its media; entries may be None. None as a whole: text only.
        chunk: Which part of its prompt is in the batch; None for a request that decodes.
        same_as: The index of an earlier request whose very media it shares; ``items`` is then not read.
    """

    items: tuple[ItemCase | None, ...] | None
    chunk: Chunk | None
    same_as: int | None = None


@dataclass(frozen=True)
class Batch:
    """A batch, ready to be embedded.

    Attributes:
        input_ids: ``[T]``.
        table: ``[V, H]``.
        ctx: Requests and chunks.
        encoders: One for each modality. They give each item's feature negated, in a dtype of their own.
        model: Takes deepstack rows apart; ``levels`` many.
        rows: What each item with offsets has or is encoded to, on the CPU, ``[tokens, H]``; with deepstack ``[tokens,
            H + levels * H]``.
        calls: For each call of an encoder, the items that it was given; grows as the batch is embedded.
    """

    input_ids: torch.Tensor
    table: torch.Tensor
    ctx: MultimodalForwardContext
    encoders: dict[Modality, EncoderSpec]
    model: "DeepstackModel"
    rows: dict[MultimodalDataItem, torch.Tensor]
    calls: list[list[MultimodalDataItem]]


class DeepstackModel:
    """A model whose encoders give main and deepstack rows side by side.

    Args:
        width: Of the main rows.
        levels: How many deepstack rows of that width follow.
    """

    def __init__(self, width: int, levels: int) -> None:
        self.width = width
        self.deepstack_visual_indexes = tuple(range(levels))

    def separate_deepstack_embeds(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take them apart: ``[n, H]`` and ``[n, levels * H]``."""
        return rows[:, : self.width], rows[:, self.width :]


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """A forward batch.

    Attributes:
        requests: Prefill requests first, then those that decode.
        ids: The token ids, one for each row of the chunks and then of the requests that decode.
        vocabulary: Rows of the table.
        width: Columns, H.
        dtype: Of the table.
        row_dtypes: Of each modality's encoder, in the order of `Modality`.
        deepstack: The modalities with deepstack rows.
        levels: Deepstack levels.
        id_dtype: torch.int32 or torch.int64.
        seed: Of the contents.
    """

    requests: tuple[RequestCase, ...]
    ids: tuple[int, ...]
    vocabulary: int
    width: int
    dtype: torch.dtype = torch.float32
    row_dtypes: tuple[torch.dtype, ...] = (torch.float32,) * len(Modality)
    deepstack: tuple[str, ...] = ()
    levels: int = 0
    id_dtype: torch.dtype = field(default=torch.int64)
    seed: int = 0

    def build(self, device: torch.device | str = "cpu", *, deepstack_form: str = "dense") -> Batch:
        """Make the requests, items and tensors.

        Args:
            device: Of ids, table and features. Precomputed rows lie on the CPU for items with an odd number of rows.
            deepstack_form: As for `mmgraph.EncoderSpec`.

        Returns:
            A batch that nothing else holds.
        """
        rows: dict[MultimodalDataItem, torch.Tensor] = {}
        built: list[MultimodalInputs | None] = []
        for request in self.requests:
            if request.same_as is not None:
                built.append(built[request.same_as])
            elif request.items is None:
                built.append(None)
            else:
                built.append(MultimodalInputs([self._item(case, rows, device) for case in request.items]))
        chunks = [request.chunk for request in self.requests if request.chunk is not None]
        calls: list[list[MultimodalDataItem]] = []
        return Batch(
            torch.tensor(self.ids, dtype=self.id_dtype, device=device),
            coded_rows(-1, self.vocabulary, self.width, seed=self.seed, dtype=self.dtype, device=device),
            MultimodalForwardContext(
                built, [chunk.prefix for chunk in chunks], [chunk.length for chunk in chunks]
            ),
            {
                modality: EncoderSpec(
                    _Encoder(self._row_dtype(modality), calls),
                    deepstack=modality.value in self.deepstack,
                    deepstack_form="sparse" if deepstack_form == "sparse" else "dense",
                )
                for modality in Modality
            },
            DeepstackModel(self.width, self.levels),
            rows,
            calls,
        )

    def _item(
        self,
        case: ItemCase | None,
        rows: dict[MultimodalDataItem, torch.Tensor],
        device: torch.device | str,
    ) -> MultimodalDataItem | None:
        if case is None:
            return None
        item = MultimodalDataItem(case.modality, case.spans, hash=case.hash)
        deep = item.modality.value in self.deepstack
        width = self.width * (1 + self.levels) if deep else self.width
        place = list(Modality).index(item.modality)
        first = 1 + 16 * (len(rows) % 8) if case.hash is None else 129 + 16 * (case.hash % 4) + 3 * place
        seed = self.seed + 31 * place + (7 * (1 + len(rows)) if case.hash is None else 1009 * case.hash)
        contents = coded_rows(first, case.tokens, width, seed=seed, dtype=self._row_dtype(item.modality))
        if case.has_feature:
            item.feature = -contents.to(device)
        if case.precomputed:
            contents = coded_rows(-first, case.tokens, width, seed=seed, dtype=contents.dtype)
            there = contents.to(device if case.tokens % 2 == 0 else "cpu")
            item.encoded = there[:, : self.width].clone()
            if deep:
                item.encoded_deepstack = there[:, self.width :].clone()
        rows[item] = contents
        return item

    def _row_dtype(self, modality: Modality) -> torch.dtype:
        return self.row_dtypes[list(Modality).index(modality)]


class _Encoder:
    """Gives features back negated, which is exact in every dtype; remembers its calls."""

    def __init__(self, dtype: torch.dtype, calls: list[list[MultimodalDataItem]]) -> None:
        self.dtype = dtype
        self.calls = calls

    def __call__(self, items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        self.calls.append(list(items))
        return -torch.cat([item.feature for item in items]).to(self.dtype)
