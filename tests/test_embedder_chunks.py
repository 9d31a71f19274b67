"""Invariant: how a prompt is cut into chunks, and in which order requests come, changes no row."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, Encoder, image_encoder, one_request, random_batch, simple_item

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

LENGTH = 14
IDS = torch.arange(LENGTH) % 7


def fresh_items() -> list[MultimodalDataItem]:
    return [
        simple_item([(2, 4), (9, 10)], variant=1, hash=1),
        simple_item([(5, 7)], variant=2),
        simple_item([(12, 13)], variant=3, hash=2),
        simple_item([(0, 0), (8, 8)], variant=3, hash=2),
    ]


def run_chunks(cuts: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(7, HIDDEN)
    encoders = image_encoder()
    inputs = MultimodalInputs(fresh_items())
    rows = []
    for start, end in itertools.pairwise((0, *cuts, LENGTH)):
        ctx = MultimodalForwardContext([inputs], [start], [end - start])
        embeds, kwargs = MultimodalEmbedder().apply(IDS[start:end], embedding, ctx, encoders)
        rows.append(embedding(IDS[start:end]) if embeds is None else embeds)
        assert kwargs == {}
    encoded = [item for call in encoders[Modality.IMAGE].fn.calls for item in call]
    assert len(encoded) == len(set(encoded))
    return torch.cat(rows)


@pytest.mark.parametrize("cut", range(LENGTH + 1))
def test_every_single_cut(cut: int) -> None:
    assert torch.equal(run_chunks((cut,)), run_chunks(()))


@pytest.mark.parametrize("cut", range(1, LENGTH - 1))
def test_every_pair_of_cuts(cut: int) -> None:
    whole = run_chunks(())
    for second in range(cut, LENGTH):
        assert torch.equal(run_chunks((cut, second)), whole)


def test_row_by_row() -> None:
    assert torch.equal(run_chunks(tuple(range(1, LENGTH))), run_chunks(()))


def test_a_chunk_that_touches_one_row_encodes_the_whole_item() -> None:
    item = simple_item([(2, 4), (9, 10)])
    rows = -item.feature
    ctx = MultimodalForwardContext([MultimodalInputs([item])], [10], [2])
    embeds, _ = MultimodalEmbedder().apply(
        torch.zeros(2, dtype=torch.int64), torch.zeros(3, HIDDEN), ctx, image_encoder()
    )
    assert torch.equal(embeds[0], rows[4])
    assert torch.equal(item.encoded, rows)


def test_a_prefix_cached_span_is_not_encoded() -> None:
    cached, wanted = simple_item([(0, 3)]), simple_item([(5, 6)])
    encoders = image_encoder()
    ctx = MultimodalForwardContext([MultimodalInputs([cached, wanted])], [4], [4])
    MultimodalEmbedder().apply(torch.zeros(4, dtype=torch.int64), torch.zeros(3, HIDDEN), ctx, encoders)
    assert encoders[Modality.IMAGE].fn.calls == [[wanted]]
    assert cached.encoded is None
    assert cached.feature is not None


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), order=st.randoms(use_true_random=False))
def test_the_order_of_requests_changes_no_row(seed: int, order: object) -> None:
    def rows_by_request(permuted: bool) -> dict[int, torch.Tensor]:
        batch = random_batch(seed, deepstack=False)
        for item in batch.precomputed:  # twins of other contents would make the order matter
            item.hash = None
        lengths = [max(length, 0) for length in batch.ctx.extend_seq_lens]
        places = list(range(len(lengths)))
        if permuted:
            order.shuffle(places)
        parts = batch.input_ids[: sum(lengths)].split(lengths) if lengths else []
        ids = torch.cat([parts[place] for place in places]) if parts else batch.input_ids[:0]
        ctx = MultimodalForwardContext(
            [batch.ctx.mm_inputs[place] for place in places],
            [batch.ctx.extend_prefix_lens[place] for place in places],
            [lengths[place] for place in places],
        )
        embeds, _ = MultimodalEmbedder().apply(ids, batch.embedding, ctx, batch.encoders)
        if embeds is None:
            return {}
        return dict(zip(places, embeds.split([lengths[place] for place in places]), strict=True))

    straight, shuffled = rows_by_request(False), rows_by_request(True)
    assert straight.keys() == shuffled.keys()
    assert all(torch.equal(straight[place], shuffled[place]) for place in straight)


def test_the_model_may_generate_the_placeholder_itself() -> None:
    item = simple_item([(1, 2)], pad_value=5)
    embedding = torch.nn.Embedding(9, HIDDEN)
    ctx = MultimodalForwardContext([MultimodalInputs([item]), MultimodalInputs([item])], [0], [4])
    ids = torch.tensor([5, 5, 5, 5, 5])  # the last row decodes, for a request with media
    embeds, _ = MultimodalEmbedder().apply(ids, embedding, ctx, image_encoder())
    text = embedding.weight[5]
    assert torch.equal(embeds, torch.stack([text, item.encoded[0], item.encoded[1], text, text]))


def test_no_media_no_embeddings() -> None:
    embedder, embedding, encoders = (
        MultimodalEmbedder(),
        torch.nn.Embedding(5, HIDDEN),
        {Modality.IMAGE: Encoder()},
    )
    ids = torch.zeros(4, dtype=torch.int64)
    media = one_request([simple_item([(0, 1)])], 4)
    for ctx, decode in (
        (media, True),
        (None, False),
        (MultimodalForwardContext([None], [0], [4]), False),
        (MultimodalForwardContext(media.mm_inputs, [], []), False),
        (MultimodalForwardContext(media.mm_inputs, [2], [2]), False),
        (MultimodalForwardContext(media.mm_inputs, [0], [0]), False),
        (MultimodalForwardContext(), False),
    ):
        assert embedder.apply(ids, embedding, ctx, encoders, is_decode_or_idle=decode) == (None, {})
    assert encoders[Modality.IMAGE].calls == []
