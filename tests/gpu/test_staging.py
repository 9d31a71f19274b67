"""Invariant: on CUDA, features of every form and dtype come to the encoder with their values, prefetched or not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mm_batches import HIDDEN, Handle, one_request, simple_item

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.features import leaves_of
from mmgraph.inputs import Modality, MultimodalDataItem
from mmgraph.staging import FeatureMover

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
ROWS = torch.randn(600, 7)

FORMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ROWS.clone(),
    "pinned": lambda: ROWS.clone().pin_memory(),
    "pinned, not dense": lambda: torch.stack([ROWS, ROWS], -1).pin_memory()[..., 0],
    "transposed": lambda: ROWS.t(),
    "expanded": lambda: ROWS[:1].expand(600, 7),
    "empty": lambda: ROWS[:0],
    "scalar": lambda: torch.tensor(3.5),
    "array": lambda: ROWS.numpy().copy(),
    "reversed array": lambda: ROWS.numpy()[::-1],
    "bf16": lambda: ROWS.bfloat16(),
    "bool": lambda: ROWS > 0,
    "complex": lambda: torch.complex(ROWS, ROWS + 1),
    "conjugate": lambda: torch.complex(ROWS, ROWS + 1).conj(),
    "float8": lambda: ROWS.to(torch.float8_e4m3fn).view(torch.uint8),
    "sparse": lambda: ROWS.relu().to_sparse(),
    "needs a gradient": lambda: ROWS.clone().requires_grad_(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "there": lambda: ROWS.to(DEVICE),
    "handle": lambda: Handle(ROWS.clone()),
    "nested": lambda: {"pixels": [ROWS.clone(), ROWS.pin_memory()], "grid": torch.tensor([1, 2, 3])},
    "mixed": lambda: [ROWS.clone(), ROWS.relu().to_sparse()],
}


def dense(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().to_dense().cpu().resolve_conj()


@pytest.mark.parametrize("early", [False, True], ids=["moved", "prefetched"])
@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_arrives(form: str, inference: bool, early: bool) -> None:
    feature = FORMS[form]()
    item = simple_item([(0, 1)], feature=feature)
    ctx = one_request([item], 2)
    found: list[torch.Tensor] = []

    def encoder(items: list[MultimodalDataItem]) -> torch.Tensor:
        leaves = leaves_of(items[0].feature)
        assert all(leaf.device == DEVICE for leaf in leaves)
        found.extend(dense(leaf) for leaf in leaves)
        return torch.zeros(2, HIDDEN, device=DEVICE)

    source = feature.tensor if isinstance(feature, Handle) else feature
    if isinstance(source, np.ndarray):
        source = torch.from_numpy(source.copy())
    expected = [dense(leaf) for leaf in leaves_of(source)]
    embedder = MultimodalEmbedder(pinned_bytes=1 << 12)
    with torch.inference_mode(inference):
        if early:
            embedder.prefetch(ctx, device=DEVICE)
        embedder.encode(embedder.plan(ctx, 2), {Modality.IMAGE: encoder}, device=DEVICE)
    assert len(found) == len(expected) > 0
    for got, wanted in zip(found, expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)


def test_a_gradient_reaches_a_feature_on_the_host() -> None:
    source = torch.ones(3, requires_grad=True)
    [moved] = FeatureMover().move([source], DEVICE)
    (moved * 2).sum().backward()
    assert torch.equal(source.grad, torch.full((3,), 2.0))


def test_prefetched_features_are_used_and_counted() -> None:
    embedder = MultimodalEmbedder()
    item = simple_item([(0, 1)])
    rows = -item.feature
    ctx = one_request([item], 2)
    assert embedder.prefetch(ctx, device="cuda") == 1
    embeds, _ = embedder.apply(
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        torch.zeros(3, HIDDEN, device=DEVICE),
        ctx,
        {Modality.IMAGE: lambda items: -items[0].feature},
    )
    assert torch.equal(embeds.cpu(), rows)
    counts = embedder.counters()
    assert (counts.prefetch_started, counts.prefetch_hits, counts.features_moved) == (1, 1, 1)
