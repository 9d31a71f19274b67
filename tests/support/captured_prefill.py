"""A prefill whose graphs read a pool: ids and ranges are inputs, assembly and deepstack rows inside. On any device."""

import copy

import torch
from mm_batches import HIDDEN, LEVELS, Encoder, Model

from mmgraph import EncoderPool, MultimodalEmbedder
from mmgraph.capture import BucketGrid, CaptureManager, rows, static
from mmgraph.embedder import EncoderSpec
from mmgraph.inputs import Modality, MultimodalDataItem, MultimodalForwardContext, MultimodalInputs
from mmgraph.ops import assemble_embeddings, deepstack_add_, expand_ranges

WIDTH = HIDDEN * (1 + LEVELS)
UNUSED = 2**31 - 1
CAPACITY = 16


def batch_of(
    seed: int, tokens: int, images: int, modality: Modality = Modality.IMAGE
) -> tuple[torch.Tensor, MultimodalForwardContext]:
    """Ids and two requests with images that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    each = tokens // 2
    requests = []
    for request in range(2):
        starts = sorted(torch.randperm(max(1, (each - 1) // 5), generator=generator)[:images].tolist())
        items = [
            MultimodalDataItem(
                modality,
                [(5 * start, 5 * start + 3)],
                hash=seed * 100 + request * 10 + number,
                feature=torch.randn(4, WIDTH if modality is Modality.IMAGE else HIDDEN, generator=generator),
            )
            for number, start in enumerate(starts)
        ]
        requests.append(MultimodalInputs(items))
    ids = torch.randint(-5, 40, (tokens,), generator=generator)
    return ids, MultimodalForwardContext(requests, [0, 0], [each, tokens - each])


def check(device: torch.device) -> CaptureManager:
    """Serve batches of many sizes, each with other images, from graphs made once, and compare each with eager."""
    table = torch.randn(30, HIDDEN, device=device)
    pool = EncoderPool(96, WIDTH, dtype=torch.float32, device=device, page_rows=4)
    encoders = {Modality.IMAGE: EncoderSpec(Encoder(WIDTH), deepstack=True), Modality.AUDIO: Encoder()}

    def prefill(ids: torch.Tensor, ranges: torch.Tensor, deep: torch.Tensor) -> torch.Tensor:
        hidden = assemble_embeddings(ids, table, pool.tensor[:, :HIDDEN], expand_ranges(ranges, ids.shape[0]))
        entries = expand_ranges(deep, ids.shape[0])
        for level in range(LEVELS):
            hidden = deepstack_add_(hidden * 0.5, pool.tensor[:, HIDDEN:], entries, level)
        return hidden

    graphs = CaptureManager(
        prefill,
        inputs={"ids": rows("tokens"), "ranges": static(), "deep": static()},
        outputs=rows("tokens"),
        buckets=BucketGrid(tokens=(24, 48)),
    )
    unused = torch.full((CAPACITY, 3), UNUSED, dtype=torch.int32, device=device)
    embedder = MultimodalEmbedder(pool=pool)
    with torch.inference_mode():
        graphs.precompile(
            example={
                "ids": torch.zeros(5, dtype=torch.int64, device=device),
                "ranges": unused,
                "deep": unused,
            },
            progress=False,
        )
        for seed in range(16):
            tokens = 12 + 2 * seed
            modality = Modality.AUDIO if seed % 5 == 4 else Modality.IMAGE
            host_ids, ctx = batch_of(seed, tokens, 1 + seed % 3, modality)
            ids = host_ids.to(device)
            expected, kwargs = MultimodalEmbedder().apply(ids, table, copy.deepcopy(ctx), encoders, Model())
            dense = kwargs.get("input_deepstack_embeds", torch.zeros(tokens, HIDDEN * LEVELS, device=device))
            for level in range(LEVELS):
                expected = expected * 0.5 + dense[:, level * HIDDEN : (level + 1) * HIDDEN]
            with embedder.prepare(ctx, tokens, encoders, Model(), width=HIDDEN) as batch:
                maps = (batch.row_map, batch.deepstack_map)
                inputs = [
                    unused if one is None else torch.from_numpy(one.padded_ranges(CAPACITY)).to(device)
                    for one in maps
                ]
                got = graphs(ids=ids, ranges=inputs[0], deep=inputs[1])
            assert torch.equal(got, expected)
    assert pool.stats().evictions > 0
    assert pool.stats().rows_pinned == 0
    return graphs
