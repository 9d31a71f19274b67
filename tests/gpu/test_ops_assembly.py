"""Invariant: on CUDA assembly equals the CPU reference bit for bit, never synchronises, and survives wrong data."""

import itertools

import numpy as np
import pytest
import torch

from mmgraph import ops
from mmgraph.ops import error_flag

pytestmark = pytest.mark.cuda

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def nothing_recorded():
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


def matrix(generator, rows, width, dtype, layout=0):
    if layout == 1:
        return torch.randn(rows, width + 3, generator=generator).to(dtype)[:, 2 : 2 + width]
    if layout == 2:
        return torch.randn(width, rows, generator=generator).to(dtype).t()
    return torch.randn(rows, width, generator=generator).to(dtype)


def case(
    seed, rows, width, pool_rows=7, vocab=11, table_dtype=torch.bfloat16, pool_dtype=torch.float32, layout=0
):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, vocab + 4, (rows,), generator=g)
    row_map = torch.randint(-1, pool_rows, (rows,), generator=g, dtype=torch.int32)
    return (
        ids,
        matrix(g, vocab, width, table_dtype, layout),
        matrix(g, pool_rows, width, pool_dtype, layout),
        row_map,
    )


def on_gpu(*tensors):
    """Copies on the GPU with the same strides."""
    moved = []
    for x in tensors:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        moved.append(copy.copy_(x))
    return moved


@pytest.mark.parametrize(("table_dtype", "pool_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("layout", [0, 1, 2])
def test_equals_the_reference_for_all_dtypes_and_layouts(table_dtype, pool_dtype, layout):
    inputs = case(1, 37, 24, table_dtype=table_dtype, pool_dtype=pool_dtype, layout=layout)
    ids, table, pool, row_map = on_gpu(*inputs)
    expected = ops.assemble_embeddings(*inputs)
    assert torch.equal(ops.assemble_embeddings(ids, table, pool, row_map).cpu(), expected)
    assert torch.equal(ops.assemble_embeddings(ids.int(), table, pool, row_map).cpu(), expected)
    for out in on_gpu(
        expected, matrix(torch.Generator(), 37, 24, table_dtype, 1), expected.t().contiguous().t()
    ):
        ops.assemble_embeddings_out(ids, table, pool, row_map, out=out.zero_())
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("width", [1, 5, 1152, 3584, 4096, 8192, 12288])
@pytest.mark.parametrize(("rows", "pool_rows"), [(0, 0), (1, 1), (16, 0), (333, 50)])
def test_equals_the_reference_for_all_sizes(width, rows, pool_rows):
    inputs = case(2, rows, width, pool_rows)
    got = ops.assemble_embeddings(*on_gpu(*inputs))
    assert torch.equal(got.cpu(), ops.assemble_embeddings(*inputs))


@pytest.mark.parametrize("layout", [0, 1, 2])
@pytest.mark.parametrize("width", [5, 4096])
def test_merge_and_deepstack_equal_the_reference(layout, width):
    g = torch.Generator().manual_seed(3)
    embeds = matrix(g, 50, width, torch.bfloat16, layout)
    mask = torch.rand(50, generator=g) < 0.4
    features = matrix(g, int(mask.sum()), width, torch.float32, layout)
    expected = ops.merge_embeddings(embeds, mask, features)
    inputs = on_gpu(embeds, mask, features)
    assert torch.equal(ops.merge_embeddings(*inputs).cpu(), expected)
    assert torch.equal(ops.merge_embeddings(*inputs, num_placeholders=features.shape[0]).cpu(), expected)
    pool = matrix(g, 9, 3 * width, torch.float32, layout)
    row_map = torch.randint(-1, 9, (50,), generator=g, dtype=torch.int32)
    for level in range(3):
        expected = ops.deepstack_add(embeds, pool, row_map, level)
        assert torch.equal(ops.deepstack_add(*on_gpu(embeds, pool, row_map), level).cpu(), expected)


def test_gradients_equal_those_on_the_cpu():
    def gradients(device):
        g = torch.Generator().manual_seed(4)
        ids, table, pool, row_map = (
            x.to(device) for x in case(4, 60, 16, table_dtype=torch.float64, pool_dtype=torch.float64)
        )
        table.requires_grad_()
        pool.requires_grad_()
        weight = torch.randn(60, 16, generator=g, dtype=torch.float64).to(device)
        hidden = ops.assemble_embeddings(ids, table, pool, row_map)
        hidden = ops.deepstack_add(hidden, torch.cat([pool, pool * 2], dim=1), row_map, 1)
        mask = torch.arange(60, device=device) % 4 == 0
        (ops.merge_embeddings(hidden, mask, torch.cat([pool, pool, pool])[:15]) * weight).sum().backward()
        return table.grad.cpu(), pool.grad.cpu()

    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("columns_adjacent", [True, False])
def test_a_buffer_that_was_written_is_seen_by_autograd(columns_adjacent):
    tensors = on_gpu(*case(12, 9, 32, table_dtype=torch.float32))
    y = torch.randn(9, 32, device="cuda", requires_grad=True).exp()
    if not columns_adjacent:
        y = torch.randn(32, 9, device="cuda", requires_grad=True).exp().t()
    loss = (y * y).sum()
    with torch.no_grad():
        ops.assemble_embeddings_out(*tensors, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_data_is_recorded_treated_safely_and_leaves_the_device_usable():
    ids, table, pool, row_map = on_gpu(*case(5, 8, 64))
    wrong = row_map.clone()
    wrong[3], wrong[6] = 7, -2
    got = ops.assemble_embeddings(ids, table, pool, wrong)
    with pytest.raises(ops.DeviceError, match=r"cuda:\d+: assemble_embeddings: .*\(2 such rows\)"):
        ops.check_errors()
    assert float(got[3].abs().sum() + got[6].abs().sum()) == 0.0
    right = ops.assemble_embeddings(ids, table, pool, row_map)
    keep = [i for i in range(8) if i not in (3, 6)]
    assert torch.equal(got[keep], right[keep])
    ops.deepstack_add(right, pool.repeat(1, 2), wrong, 1)
    with pytest.raises(ops.DeviceError, match="deepstack_add"):
        ops.check_errors("cuda")
    text = torch.full_like(row_map, -1)
    ops.assemble_embeddings(ids, table, pool, text)
    ops.check_errors()
    ops.assemble_embeddings(ids * 0 - 9, table, pool, text, strict=True)
    with pytest.raises(ops.DeviceError, match=r"had id -9 \(8 such rows\)"):
        ops.check_errors()


@pytest.mark.parametrize("features", [0, 1, 2, 4])
def test_a_count_mismatch_is_found(features):
    embeds = torch.randn(6, 32, device="cuda")
    mask = torch.tensor([True, False, True, False, False, True], device="cuda")
    with pytest.raises(ops.CountMismatchError):
        ops.merge_embeddings(embeds, mask, embeds[:features], num_placeholders=3)
    ops.merge_embeddings(embeds, mask, embeds[:features])
    with pytest.raises(ops.DeviceError, match=f"held 3 placeholders but there were {features} feature"):
        ops.check_errors()
    assert torch.equal(ops.merge_embeddings(embeds, mask, embeds[:3])[5], embeds[2])


def test_nothing_synchronises():
    ids, table, pool, row_map = on_gpu(*case(6, 40, 64))
    table, pool = table.float().requires_grad_(), pool.requires_grad_()
    mask = row_map >= 0
    features = torch.randn(int(mask.sum()), 64, device="cuda", requires_grad=True)
    host_map = ops.RowMap.from_ranges(40, [3, 20], [5, 21], [0, 1], pool_rows=7)
    deep = torch.randn(7, 128, device="cuda", requires_grad=True)

    def work():
        hidden = ops.assemble_embeddings(ids, table, pool, host_map)
        hidden = ops.merge_embeddings(hidden, mask, features)
        result = ops.deepstack_add(hidden, deep, row_map, 1)
        result.sum().backward()
        ops.assemble_embeddings_out(ids, table.detach(), pool.detach(), row_map, out=hidden.detach().clone())
        return result.detach()

    expected = work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, expected)


def test_a_graph_replays_new_values_and_a_new_map():
    ids, table, pool, row_map = on_gpu(*case(7, 32, 256))
    embeds, mask = torch.randn(32, 256, device="cuda"), torch.zeros(32, dtype=torch.bool, device="cuda")
    mask[:5] = True
    features = torch.randn(5, 256, device="cuda")

    def work():
        hidden = ops.assemble_embeddings(ids, table, pool, row_map)
        merged = ops.merge_embeddings(embeds, mask, features)
        return hidden, ops.deepstack_add(merged, pool, row_map, 0)

    with torch.inference_mode():
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        for seed in range(3):
            for static, fresh in zip(
                (ids, table, pool, row_map), on_gpu(*case(50 + seed, 32, 256)), strict=True
            ):
                static.copy_(fresh)
            embeds.normal_()
            features.normal_()
            mask.copy_(torch.randperm(32, device="cuda") < 5)
            expected = work()
            graph.replay()
            for a, b in zip(captured, expected, strict=True):
                assert torch.equal(a, b)


def test_the_first_op_of_a_device_inside_a_capture_is_refused_and_works_afterwards(monkeypatch):
    inputs = on_gpu(*case(8, 4, 16))
    expected = ops.assemble_embeddings(*inputs)
    monkeypatch.setattr(error_flag, "_flags", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ops.DuringCaptureError, match="prepare_device"), torch.cuda.graph(graph):
        ops.assemble_embeddings(*inputs)
    ops.prepare_device("cuda")
    assert torch.equal(ops.assemble_embeddings(*inputs), expected)


def test_token_counts_and_pool_rows_compile_nothing(monkeypatch):
    import triton

    def run(rows, pool_rows):
        inputs = on_gpu(*case(9, rows, 128, pool_rows))
        hidden = ops.assemble_embeddings(*inputs)
        ops.deepstack_add(hidden, inputs[2], inputs[3], 0)
        mask = inputs[3] >= 0
        ops.merge_embeddings(hidden, mask, hidden[: int(mask.sum())])

    run(5, 3)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"])
    )
    for rows, pool_rows in ((1, 1), (16, 16), (17, 2), (160, 1), (4096, 512)):
        run(rows, pool_rows)
    assert compiled == []


def test_one_compiled_graph_serves_every_size():
    torch._dynamo.reset()
    table = torch.randn(11, 64, device="cuda")

    def function(ids, pool, row_map):
        hidden = ops.assemble_embeddings(ids, table, pool * 2, row_map)
        return ops.deepstack_add(hidden.relu(), pool, row_map, 0) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for index, rows in enumerate((5, 16, 33, 64, 100, 1000)):
        ids, _, pool, row_map = on_gpu(*case(rows, rows, 64, rows // 2))
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(ids, pool, row_map), function(ids, pool, row_map))


@pytest.mark.parametrize("layout", [0, 1, 2])
def test_opcheck_passes(layout):
    ids, table, pool, row_map = on_gpu(*case(10, 9, 16, layout=layout))
    mask = row_map >= 0
    features = pool[:1].repeat(int(mask.sum()), 1)
    out = torch.empty(9, 16, device="cuda", dtype=table.dtype)
    namespace = torch.ops.mmgraph
    for op, arguments, keywords in (
        (namespace.assemble_embeddings, (ids, table, pool, row_map, False), {}),
        (namespace.assemble_embeddings_out, (ids, table, pool, row_map, False), {"out": out}),
        (namespace.merge_embeddings, (out.zero_(), mask, features, None), {}),
        (namespace.deepstack_add, (out, torch.cat([pool, pool], dim=1), row_map, 1), {}),
        (
            namespace.assemble_embeddings_autograd,
            (ids, table.detach().requires_grad_(), pool.detach().requires_grad_(), row_map, False),
            {},
        ),
    ):
        torch.library.opcheck(op.default, arguments, keywords)


def test_offsets_pass_two_to_the_31():
    width = 4096
    vocab, rows, pool_rows = 540_000, 530_000, 530_000  # each over 2^31 elements, 4.4 GB in bfloat16
    table = torch.zeros(vocab, width, dtype=torch.bfloat16, device="cuda")
    table[-3:] = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(pool_rows, width, dtype=torch.bfloat16, device="cuda")
    pool[-2:] = torch.tensor([[5.0], [6.0]], dtype=torch.bfloat16, device="cuda")
    ids = torch.full((rows,), vocab - 3, device="cuda")
    ids[-4:] = torch.tensor([vocab - 1, vocab - 2, 0, 10**9], device="cuda")
    row_map = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    row_map[-6], row_map[-5] = pool_rows - 1, pool_rows - 2
    got = ops.assemble_embeddings(ids, table, pool, row_map)
    assert got[-6:, 0].tolist() == [6.0, 5.0, 3.0, 2.0, 0.0, 3.0]
    assert bool((got[-6:] == got[-6:, :1]).all())
    assert bool((got[:-6] == 1).all())
    added = ops.deepstack_add(got, pool, row_map, 0)
    assert added[-6:, -1].tolist() == [12.0, 10.0, 3.0, 2.0, 0.0, 3.0]


def test_row_maps_survive_copies_still_in_flight():
    """Many more copies than there are pinned buffers, while the device is busy, on two streams."""
    maps = [ops.RowMap.from_ranges(5000, [0], [4999], [n], pool_rows=6000) for n in range(40)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
    copies = []
    for n, one in enumerate(maps):
        with torch.cuda.stream(streams[n % 2]):
            copies.append(one.to("cuda"))
    torch.cuda.synchronize()
    for one, copy in zip(maps, copies, strict=True):
        assert np.array_equal(copy.cpu().numpy(), one.host)


def test_every_device_works_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        ids, table, pool, row_map = (x.to(device) for x in case(11, 9, 32))
        got = ops.assemble_embeddings(ids, table, pool, row_map)
        assert got.device == device
        assert torch.equal(got.cpu(), ops.assemble_embeddings(*(x.cpu() for x in (ids, table, pool, row_map))))
