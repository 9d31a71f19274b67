"""Invariant: on CUDA rows in a pool give what rows on the items give, and a captured prefill reads them at its address.

The encoder only negates, which is exact, so every difference would be a wrong row, a wrong cast or a race.
"""

import copy

import pytest
import torch
from captured_prefill import check
from hypothesis import given, settings
from hypothesis import strategies as st
from mm_batches import HIDDEN, LEVELS, Encoder, Model, one_request, random_batch, simple_item

from mmgraph import EncoderPool, MultimodalEmbedder
from mmgraph.embedder import EncoderSpec
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import assemble_embeddings, check_errors, deepstack_add, deepstack_add_, expand_ranges
from mmgraph.row_cache import RowStore

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")
WIDTH = HIDDEN * (1 + LEVELS)


@pytest.mark.parametrize("kind", ["pool", "cache"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_the_cpu(kind: str, form: str, seed: int) -> None:
    def specs(batch: object) -> dict[Modality, EncoderSpec]:
        return {
            modality: EncoderSpec(spec.fn, deepstack=spec.deepstack, deepstack_form=form)
            for modality, spec in batch.encoders.items()
        }

    host, device = random_batch(seed), random_batch(seed, device="cuda")
    store = (
        EncoderPool(512, WIDTH, dtype=torch.float32, device=CUDA, page_rows=4)
        if kind == "pool"
        else RowStore(1 << 20)
    )
    expected, expected_kwargs = MultimodalEmbedder().apply(
        host.input_ids, host.embedding, host.ctx, specs(host), Model()
    )
    embedder = MultimodalEmbedder(pool=store)
    for _ in range(2):
        embeds, kwargs = embedder.apply(device.input_ids, device.embedding, device.ctx, specs(device), Model())
        if expected is None:
            assert embeds is None
            return
        assert torch.equal(embeds.cpu(), expected)
        assert kwargs.keys() == expected_kwargs.keys()
        if form == "dense":
            for name, value in kwargs.items():
                assert torch.equal(value.cpu(), expected_kwargs[name])
        elif kwargs:
            one, other = kwargs["deepstack_rows"], expected_kwargs["deepstack_rows"]
            for level in range(LEVELS):
                got = deepstack_add(embeds, one.pool, one.row_map, level)
                assert torch.equal(got.cpu(), deepstack_add(expected, other.pool, other.row_map, level))
            one.release()
    check_errors()


def batch_of(seed: int, images: int, tokens: int) -> tuple[torch.Tensor, MultimodalForwardContext]:
    """A batch of two requests with images that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    each = tokens // 2
    requests = []
    for request in range(2):
        starts = sorted(torch.randperm(each // 6, generator=generator)[:images].tolist())
        items = [
            MultimodalDataItem(
                "image",
                [(6 * start + 1, 6 * start + 4)],
                hash=seed * 100 + request * 10 + number,
                feature=torch.randn(4, WIDTH, generator=generator),
            )
            for number, start in enumerate(starts)
        ]
        requests.append(MultimodalInputs(items))
    ids = torch.randint(-5, 40, (tokens,), generator=generator)
    return ids, MultimodalForwardContext(requests, [0, 0], [each, each])


@pytest.mark.parametrize("form", ["ranges", "map"])
def test_one_graph_of_a_prefill_serves_batches_with_other_images(form: str) -> None:
    """Ids and ranges (or map) are inputs of the graph, the pool is read at its address, deepstack rows inside."""
    tokens, capacity = 48, 32
    pool = EncoderPool(64, WIDTH, dtype=torch.float32, device=CUDA, page_rows=4)
    table = torch.randn(30, HIDDEN, device=CUDA)
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(WIDTH), deepstack=True)}
    embedder = MultimodalEmbedder(pool=pool)
    ids = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
    ranges = torch.full((capacity, 3), 2**31 - 1, dtype=torch.int32, device=CUDA)
    entries = torch.full((tokens,), -1, dtype=torch.int32, device=CUDA)

    def prefill() -> torch.Tensor:
        row_map = expand_ranges(ranges, tokens) if form == "ranges" else entries
        hidden = assemble_embeddings(ids, table, pool.tensor[:, :HIDDEN], row_map)
        for level in range(LEVELS):
            hidden = deepstack_add_(hidden * 0.5, pool.tensor[:, HIDDEN:], row_map, level)
        return hidden

    with torch.inference_mode():
        prefill()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prefill()
        for seed in range(12):  # more images than the pool holds
            host_ids, ctx = batch_of(seed, images=1 + seed % 3, tokens=tokens)
            expected, kwargs = MultimodalEmbedder().apply(
                host_ids.cuda(), table, copy.deepcopy(ctx), encoders, Model()
            )
            for level in range(LEVELS):
                dense = kwargs["input_deepstack_embeds"][:, level * HIDDEN : (level + 1) * HIDDEN]
                expected = expected * 0.5 + dense
            with embedder.prepare(ctx, tokens, encoders, Model(), width=HIDDEN) as batch:
                ids.copy_(host_ids)
                if form == "ranges":
                    ranges.copy_(torch.from_numpy(batch.row_map.padded_ranges(capacity)))
                else:
                    entries.copy_(batch.row_map.to(CUDA))
                graph.replay()
            assert torch.equal(captured, expected)
        assert pool.stats().evictions > 0
    check_errors()


def test_a_manager_s_graphs_serve_batches_with_other_images() -> None:
    report = check(CUDA).report()
    assert report.misses == {}
    assert report.hits == 16
    check_errors()


def test_rows_are_not_reused_while_a_replay_still_reads_them() -> None:
    """The second batch's rows take the place of the first's, on another stream, while the first replay waits."""
    rows, width = 1024, 512
    pool = EncoderPool(rows, width, dtype=torch.float32, device=CUDA)
    table = torch.zeros(4, width, device=CUDA)
    embedder = MultimodalEmbedder(pool=pool)
    encoders = {Modality.IMAGE: lambda items: torch.cat([item.feature for item in items])}
    entries = torch.full((rows,), -1, dtype=torch.int32, device=CUDA)
    ids = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.inference_mode():
        results = []
        for step in range(8):
            feature = torch.full((rows, width), float(step), device=CUDA)
            ctx = one_request([MultimodalDataItem("image", [(0, rows - 1)], hash=step, feature=feature)], rows)
            stream = streams[step % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), embedder.prepare(ctx, rows, encoders, width=width) as batch:
                row_map = batch.row_map.to(CUDA)
                torch.cuda._sleep(20_000_000)
                results.append(assemble_embeddings(ids, table, pool.tensor, row_map))
        torch.cuda.synchronize()
        for step, result in enumerate(results):
            assert float(result.amin()) == float(result.amax()) == step
        del entries


def test_no_synchronisation_in_a_whole_call() -> None:
    pool = EncoderPool(64, HIDDEN, dtype=torch.float32, device=CUDA, page_rows=4)
    table = torch.randn(50, HIDDEN, device=CUDA)
    ids = torch.zeros(16, dtype=torch.int64, device=CUDA)
    embedder = MultimodalEmbedder(pool=pool)

    def call(number: int) -> torch.Tensor:
        items = [
            simple_item([(0, 3)], hash=number, variant=number),
            simple_item([(5, 8)], hash=number, variant=number),
            simple_item([(10, 11)], variant=number),
        ]
        return embedder.apply(ids, table, one_request(items, 16), {Modality.IMAGE: Encoder()})[0]

    for number in range(20):  # makes streams, buffers and kernels, and fills the pool
        call(number)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [call(number) for number in range(20, 40)]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for number, result in zip(range(20, 40), results, strict=True):
        expected, _ = MultimodalEmbedder().apply(
            ids,
            table,
            one_request([simple_item([(0, 3)], variant=number)], 16),
            {Modality.IMAGE: Encoder()},
        )
        assert torch.equal(result[:4], expected[:4])
        assert torch.equal(result[5:9], expected[:4])
    assert pool.stats().evictions > 0


def test_an_encoder_writes_to_the_pool_without_a_copy() -> None:
    pool = EncoderPool(64, HIDDEN, dtype=torch.float32, device=CUDA, page_rows=4)
    feature = torch.randn(8, HIDDEN)

    def encoder(items: list[MultimodalDataItem], out: torch.Tensor) -> torch.Tensor:
        torch.neg(items[0].feature, out=out)
        return out

    with torch.inference_mode():
        item = MultimodalDataItem("image", [(0, 7)], feature=feature)
        embeds, _ = MultimodalEmbedder(pool=pool).apply(
            torch.zeros(8, dtype=torch.int64, device=CUDA),
            torch.zeros(3, HIDDEN, device=CUDA),
            one_request([item], 8),
            {Modality.IMAGE: EncoderSpec(encoder, takes_out=True)},
        )
    assert torch.equal(embeds.cpu(), -feature)
