"""Invariant: text rows are what the embedding itself gives for clamped ids, and covered rows are never looked up."""

from collections.abc import Callable

import pytest
import torch
from mm_batches import HIDDEN, image_encoder, one_request, simple_item
from torch import nn

from mmgraph.embedder import MultimodalEmbedder
from mmgraph.errors import LookupInputError
from mmgraph.inputs import MultimodalForwardContext, MultimodalInputs
from mmgraph.text_rows import plain_table

SIZE = 11
IDS = torch.tensor([3, 1_000_005, 2**31 - 2, -200, 10, 0, 99, 4])
CLAMPED = [3, None, None, 0, 10, 0, 10, 4]


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3.0


class Recording(nn.Module):
    """Knows nothing of tables; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings = SIZE
        self.inner = nn.Embedding(SIZE, HIDDEN)
        self.asked: list[list[int]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.asked.append(ids.tolist())
        return self.inner(ids)


class Int8Rows(nn.Module):
    """A quantised table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (SIZE, HIDDEN), dtype=torch.int8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids].to(torch.bfloat16) * 0.125


def hooked() -> nn.Module:
    module = nn.Embedding(SIZE, HIDDEN)
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


def pre_hooked() -> nn.Module:
    module = nn.Embedding(SIZE, HIDDEN)
    module.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % SIZE,))
    return module


def patched() -> nn.Module:
    module = nn.Embedding(SIZE, HIDDEN)
    module.forward = lambda ids: nn.functional.embedding(ids, module.weight) - 2  # type: ignore[method-assign]
    return module


def parametrized() -> nn.Module:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    module = nn.Embedding(SIZE, HIDDEN)
    nn.utils.parametrize.register_parametrization(module, "weight", Double())
    return module


CALLED: list[Callable[[], nn.Module]] = [
    lambda: Scaled(SIZE, HIDDEN),
    Recording,
    Int8Rows,
    hooked,
    pre_hooked,
    patched,
    parametrized,
    lambda: nn.Embedding(SIZE, HIDDEN, max_norm=0.5),
    lambda: nn.Sequential(nn.Embedding(SIZE, HIDDEN), nn.Tanh()),
    lambda: nn.Embedding(SIZE, HIDDEN, padding_idx=3),
]
PLAIN: list[Callable[[], nn.Module]] = [
    lambda: nn.Embedding(SIZE, HIDDEN),
    lambda: nn.Embedding(SIZE, HIDDEN, dtype=torch.bfloat16),
    lambda: nn.Embedding(SIZE, HIDDEN, padding_idx=3).requires_grad_(False),
]


@pytest.mark.parametrize("make", CALLED + PLAIN)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_text_rows_are_the_module_s_own(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(0)
    texts = make()(torch.tensor([clamped for clamped in CLAMPED if clamped is not None]))
    if isinstance(module, nn.Sequential):
        ids = IDS.clamp(0, SIZE - 1)  # nothing says how many ids it knows
    else:
        ids = IDS
    item = simple_item([(1, 2)])
    embeds, _ = MultimodalEmbedder().apply(ids.to(dtype), module, one_request([item], 8), image_encoder())
    assert embeds.dtype == texts.dtype
    assert torch.equal(embeds, torch.cat([texts[:1], item.encoded.to(texts.dtype), texts[1:]]))


def test_which_embeddings_are_called() -> None:
    assert all(plain_table(make()) is None for make in CALLED)
    assert all(plain_table(make()) is not None for make in PLAIN)
    with torch.no_grad():
        assert plain_table(nn.Embedding(SIZE, HIDDEN, padding_idx=3)) is not None


def test_a_global_hook_counts() -> None:
    module = nn.Embedding(SIZE, HIDDEN)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert plain_table(module) is None
    finally:
        handle.remove()
    assert plain_table(module) is not None


def test_covered_rows_are_not_looked_up() -> None:
    module = Recording()
    MultimodalEmbedder().apply(IDS, module, one_request([simple_item([(1, 2)])], 8), image_encoder())
    assert module.asked == [[clamped for clamped in CLAMPED if clamped is not None]]


def test_renormalising_spares_the_rows_of_covered_ids() -> None:
    module = nn.Embedding(SIZE, HIDDEN, max_norm=0.5)
    last = module.weight[SIZE - 1].detach().clone()
    ids = torch.tensor([0, SIZE - 1, 1_000_000])
    MultimodalEmbedder().apply(ids, module, one_request([simple_item([(1, 2)])], 3), image_encoder())
    assert torch.equal(module.weight[SIZE - 1], last)
    assert module.weight[0].norm() <= 0.5 + 1e-6


@pytest.mark.parametrize("make", [Recording, lambda: nn.Embedding(SIZE, HIDDEN)])
def test_all_rows_covered(make: Callable[[], nn.Module]) -> None:
    item = simple_item([(0, 3)])
    embeds, _ = MultimodalEmbedder().apply(
        torch.full((4,), 10**6), make(), one_request([item], 4), image_encoder()
    )
    assert torch.equal(embeds, item.encoded)


def test_tables_and_functions_will_do() -> None:
    table = torch.randn(SIZE, HIDDEN)
    ctx = one_request([simple_item([(1, 2)])], 8)
    from_table, _ = MultimodalEmbedder().apply(IDS, table, ctx, image_encoder())
    from_function, _ = MultimodalEmbedder().apply(
        IDS.clamp(max=SIZE - 1), lambda ids: table[ids], ctx, image_encoder()
    )
    assert torch.equal(from_table, from_function)
    assert torch.equal(from_table[0], table[3])


@pytest.mark.parametrize("make", [Recording, lambda: nn.Embedding(SIZE, HIDDEN), hooked])
def test_strict_refuses_uncovered_ids_outside_the_vocabulary(make: Callable[[], nn.Module]) -> None:
    module, item = make(), simple_item([(1, 2)])
    ctx = one_request([item], 8)
    encoders = image_encoder()
    with pytest.raises(
        LookupInputError,
        match=r"request 0: id -200 in row 3 of input_ids, position 3 of its prompt, is outside the vocabulary of 11",
    ) as caught:
        MultimodalEmbedder(strict=True).apply(IDS, module, ctx, encoders)
    assert caught.value.request == 0
    assert encoders[item.modality].fn.calls == []
    fine = IDS.clone()
    fine[[3, 6]] = 1
    embeds, _ = MultimodalEmbedder(strict=True).apply(fine, module, ctx, encoders)
    assert torch.equal(embeds[1:3], item.encoded)
    embedder = MultimodalEmbedder(strict=True)
    with pytest.raises(LookupInputError, match=r"^id -200 in row 3 of input_ids is outside the vocabulary"):
        embedder.assemble(embedder.plan(ctx, 8), IDS, module, encoders)


@pytest.mark.parametrize("make", [Recording, lambda: nn.Embedding(SIZE, HIDDEN), hooked])
def test_strict_sets_aside_only_the_requests_with_such_ids(make: Callable[[], nn.Module]) -> None:
    module = make()
    items = [simple_item([(3, 4)], variant=k) for k in range(2)]
    ctx = MultimodalForwardContext(
        [MultimodalInputs([items[0]]), None, MultimodalInputs([items[1]]), None, None], [2, 0, 2], [4, 2, 4]
    )
    ids = torch.tensor([1, 99, 99, 2, 3, 4, 5, 99, 99, -7, 6, SIZE])  # the last two rows decode
    embedder, encoders = MultimodalEmbedder(strict=True), image_encoder()
    with pytest.raises(LookupInputError, match=r"request 2: id -7 in row 9 .* position 5 of its prompt"):
        embedder.apply(ids, module, ctx, encoders)
    result = embedder.apply_result(ids, module, ctx, encoders, on_error="isolate")
    assert {request: type(error) for request, error in result.failed.items()} == dict.fromkeys(
        (2, 4), LookupInputError
    )
    assert result.failed[4].request == 4
    assert "request 4: id 11 in row 11 of input_ids is outside" in str(result.failed[4])
    assert encoders[items[0].modality].fn.calls == [[items[0]]]
    assert items[1].encoded is None
    texts = module(torch.tensor([1, 2, 3, 4, 6]))
    assert torch.equal(result.embeds[[0, 3, 4, 5, 10]], texts)
    assert torch.equal(result.embeds[1:3], items[0].encoded)
    ids[0] = ids[9]
    assert embedder.apply_result(ids, module, ctx, encoders, on_error="isolate").embeds is None


@pytest.mark.parametrize("ids", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4), [0, 1, 2, 3]])
def test_ids_must_be_flat_integers(ids: object) -> None:
    ctx, encoders = one_request([simple_item([(1, 2)])], 4), image_encoder()
    with pytest.raises(LookupInputError, match="input_ids must be an int32 or int64 tensor of one dimension"):
        MultimodalEmbedder().apply(ids, torch.zeros(3, HIDDEN), ctx, encoders)
    good = torch.zeros(4, dtype=torch.int64)
    assert MultimodalEmbedder().apply(good, torch.zeros(3, HIDDEN), ctx, encoders)[0].shape == (4, HIDDEN)


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (lambda ids: torch.zeros(1, HIDDEN), r"rows \[2, width\] for 2 ids, got torch.float32 \[1, 5\]"),
        (lambda ids: torch.zeros(2, HIDDEN).int(), r"rows \[2, width\] for 2 ids, got torch.int32 \[2, 5\]"),
        (
            torch.zeros(HIDDEN),
            r"table must hold floating-point rows \[vocabulary, width\], got torch.float32 \[5\]",
        ),
        (torch.zeros(3, HIDDEN).int(), r"table must hold .* got torch.int32 \[3, 5\]"),
        (lambda ids: None, "got NoneType"),
        (7, "must be a module, a table or a function, got int"),
    ],
)
def test_an_embedding_that_gives_something_else_is_refused_before_encoding(
    embedding: object, message: str
) -> None:
    item, encoders = simple_item([(1, 2)]), image_encoder()
    ctx, ids = one_request([item], 4), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(LookupInputError, match=message):
        MultimodalEmbedder().apply(ids, embedding, ctx, encoders)
    assert encoders[item.modality].fn.calls == []
    assert item.encoded is None
    assert MultimodalEmbedder().apply(ids, torch.zeros(3, HIDDEN), ctx, encoders)[0] is not None


@pytest.mark.parametrize("make", [lambda: nn.Embedding(SIZE, HIDDEN), lambda: Scaled(SIZE, HIDDEN)])
def test_gradients_reach_text_rows_only_and_add_up_in_sources(make: Callable[[], nn.Embedding]) -> None:
    module = make()
    rows = torch.randn(2, HIDDEN, requires_grad=True)
    items = [simple_item([(1, 2)], hash=4, encoded=rows), simple_item([(0, 1)], hash=4)]
    ctx = MultimodalForwardContext([MultimodalInputs([item]) for item in items], [0, 0], [3, 2])
    embeds, _ = MultimodalEmbedder().apply(torch.tensor([6, 7, 8, 7, 8]), module, ctx, image_encoder())
    embeds.sum().backward()
    scale = 3.0 if isinstance(module, Scaled) else 1.0
    expected = torch.zeros(SIZE, HIDDEN)
    expected[6] = scale
    assert torch.equal(module.weight.grad, expected)
    assert torch.equal(rows.grad, torch.full_like(rows, 2.0))
