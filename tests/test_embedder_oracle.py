"""Invariant: on any batch the embedder's output equals a walk over the prompt positions, bit for bit.

So do what each encoder was given, and which items were changed.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import Handle, Model, random_batch

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.inputs import Modality


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32 - 1), deepstack=st.booleans())
def test_equals_the_walk(seed: int, deepstack: bool) -> None:
    batch = random_batch(seed, deepstack=deepstack)
    expected, expected_deep = batch.expected()
    canonicals = batch.canonicals()
    touched = {item for _, item, _ in batch.touched()}
    handles = {item: item.feature for item in batch.contents if isinstance(item.feature, Handle)}
    untouched = {item: (item.feature, item.encoded) for item in batch.contents if item not in touched}
    given_ids = batch.input_ids.clone()

    embeds, kwargs = MultimodalEmbedder().apply(
        batch.input_ids, batch.embedding, batch.ctx, batch.encoders, Model()
    )

    assert torch.equal(batch.input_ids, given_ids)
    if not touched:
        assert embeds is None
        assert kwargs == {}
    else:
        assert embeds is not None
        assert embeds.dtype == batch.embedding.weight.dtype
        assert torch.equal(embeds, expected)
        if any(item.modality in batch.deepstack for item in touched):
            assert list(kwargs) == ["input_deepstack_embeds"]
            assert kwargs["input_deepstack_embeds"].dtype == embeds.dtype
            assert torch.equal(kwargs["input_deepstack_embeds"], expected_deep)
        else:
            assert kwargs == {}
    for modality in Modality:
        misses = [i for i in canonicals.values() if i.modality is modality and i not in batch.precomputed]
        assert batch.encoders[modality].fn.calls == ([misses] if misses else [])
    for item in touched:
        assert item.feature is None
        assert item.encoded.shape[0] == item.num_tokens
        assert item not in handles or handles[item].released == 1
    for item, (feature, encoded) in untouched.items():
        assert item.feature is feature
        assert item.encoded is encoded


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_second_call_encodes_nothing_and_gives_the_same(seed: int) -> None:
    batch = random_batch(seed)
    embedder = MultimodalEmbedder()
    first, deep = embedder.apply(batch.input_ids, batch.embedding, batch.ctx, batch.encoders, Model())
    calls = [len(spec.fn.calls) for spec in batch.encoders.values()]
    second, deep_again = embedder.apply(batch.input_ids, batch.embedding, batch.ctx, batch.encoders, Model())
    assert [len(spec.fn.calls) for spec in batch.encoders.values()] == calls
    assert (first is None) == (second is None)
    if first is not None:
        assert torch.equal(first, second)
    assert deep.keys() == deep_again.keys()
    assert all(torch.equal(deep[name], deep_again[name]) for name in deep)
