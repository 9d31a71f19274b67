"""Invariant: one embedder may be called from several threads on the same items; each item is encoded once."""

import copy
import pickle
import threading
import time

import pytest
import torch
from mm_batches import HIDDEN, Encoder, simple_item

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.errors import MissingFeatureError
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs

TABLE = torch.randn(7, HIDDEN)
THREADS = 4


class Slow(Encoder):
    """Gives other threads the time to get in between."""

    def __call__(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        time.sleep(0.002)
        return super().__call__(items)


def batch(items: list[MultimodalDataItem]) -> MultimodalForwardContext:
    return MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0] * 3, [4] * 3)


def in_threads(work: object) -> list[object]:
    results: list[object] = [None] * THREADS
    barrier = threading.Barrier(THREADS)

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_shared_items_are_encoded_once(on_error: str, attempt: int) -> None:
    ids = torch.zeros(12, dtype=torch.int64)
    items = [simple_item([(1, 2)], variant=k, hash=k) for k in range(3)]
    rows = [item.feature for item in items]
    embedder, encoder = MultimodalEmbedder(), Slow()
    results = in_threads(
        lambda index: embedder.apply_result(
            ids, TABLE, batch(items), {Modality.IMAGE: encoder}, on_error=on_error
        )
    )
    expected = TABLE[0].repeat(12, 1)
    for k in range(3):
        expected[4 * k + 1 : 4 * k + 3] = -rows[k]
    for result in results:
        assert not isinstance(result, Exception), result
        assert result.failed == {}
        assert torch.equal(result.embeds, expected)
    assert encoder.calls == [items]


def test_rows_that_a_twin_got_since_the_plan_was_made_are_taken() -> None:
    first, second = simple_item([(0, 1)], hash=1, feature=None), simple_item([(0, 1)], hash=1)
    embedder, encoder = MultimodalEmbedder(), Encoder()
    both = MultimodalForwardContext([MultimodalInputs([first]), MultimodalInputs([second])], [0, 0], [2, 2])
    plan = embedder.plan(both, 4)
    alone = MultimodalForwardContext([MultimodalInputs([second])], [0], [2])
    embedder.encode(embedder.plan(alone, 2), {Modality.IMAGE: encoder}, device="cpu")
    embedder.encode(plan, {Modality.IMAGE: encoder}, device="cpu")
    assert encoder.calls == [[second]]
    assert first.encoded is second.encoded


def test_rows_of_a_twin_that_do_not_fit_are_not_taken() -> None:
    first, second = simple_item([(0, 1)], hash=1, feature=None), simple_item([(0, 1)], hash=1)
    embedder = MultimodalEmbedder()
    both = MultimodalForwardContext([MultimodalInputs([first]), MultimodalInputs([second])], [0, 0], [2, 2])
    plan = embedder.plan(both, 4)
    second.encoded, second.feature = torch.zeros(1, HIDDEN), None
    with pytest.raises(MissingFeatureError):
        embedder.encode(plan, {Modality.IMAGE: Encoder()}, device="cpu")
    assert first.encoded is None


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda embedder: pickle.loads(pickle.dumps(embedder))]
)
def test_an_embedder_can_be_copied(again: object) -> None:
    embedder = again(MultimodalEmbedder(strict=True, timing=True))
    assert (embedder.strict, embedder.timing, embedder.last_timing) == (True, True, None)
    item = simple_item([(1, 2)])
    embeds, _ = embedder.apply(
        torch.zeros(4, dtype=torch.int64),
        TABLE,
        MultimodalForwardContext([MultimodalInputs([item])], [0], [4]),
        {Modality.IMAGE: Encoder()},
    )
    assert torch.equal(embeds[1:3], item.encoded)
