"""Invariant: on CUDA a list of tensors is assembled as if joined, bit for bit and in one launch; gradients repeat."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import ops
from mmgraph.ops.assembly import gather as gathering

pytestmark = pytest.mark.cuda

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def nothing_recorded():
    ops.prepare_device("cuda")
    yield
    ops.check_errors()


def draw_map(rng, rows, pool_rows, count):
    """A map of up to ``count`` disjoint ranges of up to 9 rows."""
    if rows == 0 or pool_rows == 0:
        return ops.RowMap.from_ranges(rows, [], [], [], pool_rows=pool_rows)
    starts = np.sort(rng.choice(rows, size=min(count, rows), replace=False))
    ends = np.minimum(starts + rng.integers(0, 9, starts.shape[0]), np.append(starts[1:], rows) - 1)
    ends = np.minimum(ends, starts + pool_rows - 1)
    sources = np.array([int(rng.integers(0, pool_rows - (e - s))) for s, e in zip(starts, ends, strict=True)])
    return ops.RowMap.from_ranges(rows, starts, ends, sources.astype(np.int64), pool_rows=pool_rows)


def draw(seed, rows, width, sizes, dtypes, table_dtype=torch.bfloat16, layouts=(0, 1, 2), count=9):
    """Ids, table, parts and map on the CPU."""
    g = torch.Generator().manual_seed(seed)
    parts = []
    for index, size in enumerate(sizes):
        dtype, layout = dtypes[index % len(dtypes)], layouts[index % len(layouts)]
        whole = torch.randn(size, width + 8, generator=g).to(dtype)
        part = whole[:, 8:] if layout == 1 else whole[:, :width].contiguous()
        parts.append(part.t().contiguous().t() if layout == 2 else part)
    ids = torch.randint(-3, 15, (rows,), generator=g)
    table = torch.randn(11, width, generator=g).to(table_dtype)
    return ids, table, parts, draw_map(np.random.default_rng(seed), rows, sum(sizes), count)


def on_gpu(tensor):
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return copy.copy_(tensor)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from([0, 1, 17, 300]),
    width=st.sampled_from([5, 64, 1152, 4096]),
    sizes=st.lists(st.integers(0, 40), max_size=7),
    kinds=st.integers(1, 4),
    table_dtype=st.sampled_from(DTYPES),
    layouts=st.sampled_from([(0,), (0, 1), (2, 1, 0)]),
    strict=st.booleans(),
)
def test_lists_equal_the_reference(seed, rows, width, sizes, kinds, table_dtype, layouts, strict):
    ids, table, parts, row_map = draw(seed, rows, width, sizes, DTYPES[:kinds], table_dtype, layouts)
    if strict:
        ids = ids.clamp(0, 10)
    expected = ops.assemble_embeddings(ids, table, parts, row_map, strict=strict)
    moved = [on_gpu(part) for part in parts]
    ids, table = ids.cuda(), table.cuda()
    with torch.no_grad():
        got = ops.assemble_embeddings(ids, table, moved, row_map, strict=strict)
        assert torch.equal(got.cpu(), expected)
        out = torch.empty_like(got)
        ops.assemble_embeddings_out(ids, table, moved, row_map, out=out, strict=strict)
        assert torch.equal(out, got)
        turned = torch.empty(width, rows, dtype=got.dtype, device="cuda").t()
        ops.assemble_embeddings_out(ids, table, moved, row_map, out=turned, strict=strict)
        assert torch.equal(turned, got)
        if parts:
            joined = torch.cat(moved)
            for entries in (row_map, row_map.to("cuda")):
                assert torch.equal(ops.assemble_embeddings(ids, table, joined, entries, strict=strict), got)


def test_gradients_of_lists_equal_those_on_the_cpu():
    def gradients(device, dtypes):
        ids, table, parts, row_map = draw(5, 300, 24, (40, 3, 0, 60), dtypes, torch.float64, (0,), count=60)
        ids, table = ids.to(device), table.to(device).requires_grad_()
        parts = [part.to(device).requires_grad_(index != 1) for index, part in enumerate(parts)]
        out = ops.assemble_embeddings(ids, table, parts, row_map)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out * weight.to(device)).sum().backward()
        assert parts[1].grad is None
        return [x.grad.cpu() for x in (table, parts[0], parts[2], parts[3])]

    for dtypes in ((torch.float64,), (torch.float64, torch.float32)):
        for one, other in zip(gradients("cuda", dtypes), gradients("cpu", dtypes), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [24, 4096])
def test_gradients_with_long_runs_are_right_and_repeat(dtype, width):
    """One id and one pool row thousands of times: runs that are cut in chunks and joined."""
    rows, vocab, pool_rows = 5000, 300, 200
    g = torch.Generator().manual_seed(0)
    ids = torch.where(
        torch.rand(rows, generator=g) < 0.6, 7, torch.randint(-3, vocab + 3, (rows,), generator=g)
    )
    row_map = torch.randint(-1, pool_rows, (rows,), generator=g, dtype=torch.int32)
    row_map[torch.rand(rows, generator=g) < 0.3] = 5
    row_map[torch.rand(rows, generator=g) < 0.4] = -1
    grad = torch.randn(rows, width, generator=g)
    backward = torch.ops.mmgraph.assemble_embeddings_backward
    arguments = (vocab, pool_rows, dtype, dtype, True, True)
    exact = backward(
        grad.to(dtype).double(), ids, row_map, vocab, pool_rows, torch.float64, torch.float64, True, True
    )
    grad = grad.to(dtype).cuda()
    got = backward(grad, ids.cuda(), row_map.cuda(), *arguments)
    again = backward(grad, ids.cuda(), row_map.cuda(), *arguments)
    for one, other, right in zip(got, again, exact, strict=True):
        assert torch.equal(one, other)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(one.cpu().double(), right, rtol=tolerance, atol=tolerance * 100)


def test_a_compiled_training_step_equals_eager():
    torch._dynamo.reset()

    def step(ids, table, pool, row_map, deep):
        hidden = ops.assemble_embeddings(ids, table, pool, row_map)
        return ops.deepstack_add(hidden * 2, deep, row_map, 1).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for index, rows in enumerate((50, 64, 77)):
        ids, table, parts, row_map = draw(rows, rows, 32, (rows,), (torch.float64,), torch.float64, (0,))
        entries = row_map.to("cuda")
        results = []
        for function in (step, compiled):
            leaves = [x.cuda().requires_grad_() for x in (table, parts[0], torch.cat([parts[0]] * 3, 1))]
            with torch._dynamo.config.patch(error_on_recompile=index > 0):
                function(ids.cuda(), leaves[0], leaves[1], entries, leaves[2]).backward()
            results.append([leaf.grad for leaf in leaves])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_parts_may_be_freed_and_their_memory_used_again_at_once():
    ids, table, _, _ = draw(1, 4096, 1024, (), (torch.float32,), torch.float32)
    ids, table = ids.cuda(), table.cuda()
    busy = torch.randn(4096, 4096, device="cuda")
    row_map = ops.RowMap.from_ranges(4096, [0, 2048], [2047, 4095], [0, 2048], pool_rows=4096)
    results = []
    for step in range(10):
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        parts = [torch.full((2048, 1024), float(2 * step + half), device="cuda") for half in range(2)]
        out = ops.assemble_embeddings(ids, table, parts, row_map)
        del parts
        torch.full((2048, 1024), float("nan"), device="cuda")  # takes the memory that was freed
        results.append(
            torch.stack([out[:2048].amin(), out[:2048].amax(), out[2048:].amin(), out[2048:].amax()])
        )
    for step, values in enumerate(results):
        assert values.tolist() == [2.0 * step, 2.0 * step, 2.0 * step + 1, 2.0 * step + 1]


def test_lists_are_one_launch_and_no_copy_of_rows():
    ids, table, parts, row_map = draw(2, 512, 4096, (100, 30, 200), (torch.bfloat16,), layouts=(0, 1))
    ids, table, parts = ids.cuda(), table.cuda(), [on_gpu(part) for part in parts]
    ops.assemble_embeddings(ids, table, parts, row_map)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.assemble_embeddings(ids, table, parts, row_map)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("gather_kernel" in name for name in kernels) == 1
    assert all("gather_kernel" in name or "Memcpy HtoD" in name for name in kernels), kernels


def test_transient_memory_is_small_for_many_ranges():
    rows, items = 32768, 64
    ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
    table = torch.zeros(10, 512, dtype=torch.bfloat16, device="cuda")
    parts = [torch.zeros(400, 512, dtype=torch.bfloat16, device="cuda") for _ in range(items)]
    starts = np.arange(items) * 512
    row_map = ops.RowMap.from_ranges(rows, starts, starts + 399, np.arange(items) * 400, pool_rows=items * 400)
    for pool in (parts, torch.cat(parts)):
        kept = ops.assemble_embeddings(ids, table, pool, row_map)
        del kept
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = ops.assemble_embeddings(ids, table, pool, row_map)
        transient = torch.cuda.max_memory_allocated() - before - out.numel() * 2
        assert transient <= 64 * items + 8 * rows


def test_nothing_synchronises_and_nothing_compiles_for_other_counts(monkeypatch):
    import triton

    def run(rows, sizes, count):
        ids, table, parts, row_map = draw(rows, rows, 128, sizes, (torch.bfloat16,), layouts=(0,), count=count)
        moved = [part.cuda() for part in parts]
        inputs = ids.cuda(), table.cuda(), moved, row_map
        places = torch.arange(moved[0].shape[0], dtype=torch.int32, device="cuda")
        pool = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")
        padded = torch.from_numpy(row_map.padded_ranges(count + 1)).cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            hidden = ops.assemble_embeddings(*inputs)
            ops.store_rows(moved[0], places, out=pool)
            entries = ops.expand_ranges(padded, rows)
            ops.deepstack_add_(hidden, pool, entries.clamp(max=63), 0)
            row_map.to("cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(33, (5, 6), 3)
    run(33, (5,), 3)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"])
    )
    for rows, sizes, count in ((1, (1,), 1), (16, (16, 16, 16), 16), (500, (3,) * 30, 60), (4096, (40,), 1)):
        run(rows, sizes, count)
    assert compiled == []


def test_a_graph_replays_ranges_places_and_rows_that_changed():
    """Ids, ranges and rows are the graph's inputs; the pool is filled and read inside it."""
    rows, width, capacity = 64, 256, 8
    table = torch.randn(11, width, device="cuda")
    ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
    ranges = torch.from_numpy(
        ops.RowMap.from_ranges(rows, [], [], [], pool_rows=0).padded_ranges(capacity)
    ).cuda()
    pool = torch.zeros(40, 3 * width, device="cuda")
    fresh = torch.zeros(10, 3 * width, device="cuda")
    places = torch.full((10,), -1, dtype=torch.int32, device="cuda")

    def prefill():
        ops.store_rows(fresh, places, out=pool)
        entries = ops.expand_ranges(ranges, rows)
        hidden = ops.assemble_embeddings(ids, table, pool[:, :width], entries)
        for level in range(2):
            hidden = hidden * 0.5
            ops.deepstack_add_(hidden, pool[:, width:], entries, level)
        return hidden

    with torch.inference_mode():
        prefill()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prefill()
        rng = np.random.default_rng(0)
        for seed in range(6):
            row_map = draw_map(rng, rows, 40, seed + 1)
            ranges.copy_(torch.from_numpy(row_map.padded_ranges(capacity)))
            ids.random_(-5, 20)
            fresh.normal_()
            places.copy_(torch.randperm(40, device="cuda")[:10].int())
            graph.replay()
            entries = torch.from_numpy(row_map.host.copy()).cuda()
            assert torch.equal(pool[places.long()], fresh)
            expected = ops.assemble_embeddings(ids, table, pool[:, :width], entries)
            for level in range(2):
                expected = ops.deepstack_add(expected * 0.5, pool[:, width:], entries, level)
            assert torch.equal(captured, expected)


@pytest.mark.parametrize("layout", [0, 1])
def test_opcheck_passes(layout):
    g = torch.Generator().manual_seed(0)
    buffer = torch.randn(9, 40, generator=g).cuda()
    out = buffer[:, 4:20] if layout else buffer[:, :16].contiguous()
    rows = torch.randn(4, 16, generator=g, dtype=torch.float64).cuda()
    places = torch.tensor([8, -1, 0, 3], dtype=torch.int32, device="cuda")
    row_map = torch.tensor([-1, 0, 3, -1, 2, -1, -1, 1, 1], dtype=torch.int32, device="cuda")
    ranges = torch.tensor([[0, 2, 5], [4, 4, 0], [2**31 - 1] * 3], dtype=torch.int32, device="cuda")
    for name, arguments, keywords in (
        ("store_rows", (rows, places), {"out": out}),
        ("deepstack_add_", (out, torch.cat([rows, rows], 1), row_map, 1), {}),
        ("expand_ranges", (ranges, 6), {}),
        (
            "assemble_embeddings_backward",
            (out, row_map.long(), row_map, 3, 4, out.dtype, rows.dtype, True, True),
            {},
        ),
        ("merge_embeddings_backward", (out, row_map > 0, 4, rows.dtype), {}),
        ("deepstack_add_backward", (out, row_map, 1, 4, 32, rows.dtype), {}),
    ):
        torch.library.opcheck(getattr(torch.ops.mmgraph, name).default, arguments, keywords)


def test_wrong_data_is_recorded_and_harms_nothing():
    buffer = torch.zeros(5, 64, device="cuda")
    rows = torch.ones(3, 64, device="cuda")
    ops.store_rows(rows, torch.tensor([4, 5, -2], dtype=torch.int32, device="cuda"), out=buffer)
    with pytest.raises(ops.DeviceError, match=r"store_rows: a place was outside.*\(2 such"):
        ops.check_errors()
    assert buffer.sum(1).tolist() == [0, 0, 0, 0, 64]
    unused = 2**31 - 1
    for wrong in (
        [[0, 3, 0], [3, 4, 0]],
        [[2, 1, 0]],
        [[0, 10, 0]],
        [[5, 6, 0], [1, 2, 0]],
        [[-1, 2, 0]],
        [[unused, 0, 0], [1, 2, 0]],
        [[1, 2, -1]],
        [[1, 2, unused]],
    ):
        ops.expand_ranges(torch.tensor(wrong, dtype=torch.int32, device="cuda"), 10)
        with pytest.raises(ops.DeviceError, match="must ascend"):
            ops.check_errors()
    ids = torch.tensor([0, 99, 3], device="cuda")
    table = torch.randn(4, 64, device="cuda")
    row_map = ops.RowMap.from_ranges(3, [0], [0], [1], pool_rows=3)
    ops.assemble_embeddings(ids, table, [rows], row_map, strict=True)
    with pytest.raises(ops.DeviceError, match="row 1 had id 99"):
        ops.check_errors()


def test_lazily_negated_tensors_keep_their_sign():
    ids, table, parts, row_map = draw(8, 40, 16, (5, 7), (torch.float32,), torch.float32, (0,))
    ids, table, parts = ids.cuda(), table.cuda(), [part.cuda() for part in parts]
    expected = -ops.assemble_embeddings(ids, table, parts, row_map)
    table, parts = torch._neg_view(table), [torch._neg_view(part) for part in parts]
    assert torch.equal(ops.assemble_embeddings(ids, table, parts, row_map), expected)
    pool = torch._neg_view(-torch.cat(parts))
    assert pool.is_neg()
    for entries in (row_map, row_map.to("cuda"), torch._neg_view(-row_map.to("cuda"))):
        assert torch.equal(ops.assemble_embeddings(ids, table, pool, entries), expected)
        assert torch.equal(ops.assemble_embeddings(torch._neg_view(-ids), table, pool, entries), expected)
    out = torch.empty_like(expected)
    ops.assemble_embeddings_out(ids, table, parts, row_map, out=out)
    assert torch.equal(out, expected)
    negated = torch._neg_view(torch.empty_like(expected))
    with pytest.raises(ops.ArgumentError, match="out must not be lazily negated"):
        ops.assemble_embeddings_out(ids, table, parts, row_map, out=negated)


def test_lists_with_8_bits_equal_the_cpu():
    for dtypes in (
        (torch.float8_e4m3fn,),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
    ):
        ids, table, parts, row_map = draw(9, 40, 16, (5, 7), dtypes, torch.float32, (0,))
        expected = ops.assemble_embeddings(ids, table, parts, row_map)
        moved = [part.cuda().requires_grad_() for part in parts]
        got = ops.assemble_embeddings(ids.cuda(), table.cuda(), moved, row_map)
        assert torch.equal(got.detach().cpu(), expected)
        got.sum().backward()
        counts = torch.bincount(torch.from_numpy(row_map.host[row_map.host >= 0]).long(), minlength=12).float()
        for part, count in zip(moved, counts.split([5, 7]), strict=True):
            assert part.grad.dtype == part.dtype
            assert torch.equal(part.grad.float().cpu(), count[:, None].expand(-1, 16).to(part.dtype).float())


def test_sparse_parts_are_refused():
    ids, table, parts, row_map = draw(10, 40, 16, (5, 7), (torch.float32,), torch.float32, (0,))
    ids, table, parts = ids.cuda(), table.cuda(), [part.cuda() for part in parts]
    expected = ops.assemble_embeddings(ids, table, parts, row_map)
    for other in (parts[1].to_sparse(), parts[1].to_sparse_csr(), parts[1].double().to_sparse()):
        with pytest.raises(ops.ArgumentError, match=r"pool\[1\] must be a dense tensor"):
            ops.assemble_embeddings(ids, table, [parts[0], other], row_map)
        assert torch.equal(ops.assemble_embeddings(ids, table, parts, row_map), expected)


def test_traces_transforms_and_subclasses_take_the_op():
    from torch._subclasses.fake_tensor import FakeTensorMode

    ids, table, parts, row_map = draw(3, 20, 16, (5, 7), (torch.float32,), torch.float32, (0,))
    ids, table, parts = ids.cuda(), table.cuda(), [part.cuda() for part in parts]
    assert gathering.can_gather(ids, table, parts)
    expected = ops.assemble_embeddings(ids, table, parts, row_map)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert not gathering.can_gather(ids, mode.from_tensor(table), parts)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    watch = Watch()
    watch.seen = []
    with watch:
        got = ops.assemble_embeddings(ids, table, parts, row_map)
    assert any("assemble_embeddings" in name for name in watch.seen)
    assert torch.equal(got, expected)


def test_columns_a_capture_refuses_a_row_map_and_works_afterwards():
    ids, table, parts, row_map = draw(4, 20, 16, (5, 7), (torch.float32,), torch.float32, (0,))
    ids, table, parts = ids.cuda(), table.cuda(), [part.cuda() for part in parts]
    expected = ops.assemble_embeddings(ids, table, parts, row_map)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ops.DuringCaptureError, match="reused"), torch.cuda.graph(graph):
        ops.assemble_embeddings(ids, table, parts, row_map)
    assert torch.equal(ops.assemble_embeddings(ids, table, parts, row_map), expected)


def test_offsets_of_lists_pass_two_to_the_31():
    width, rows = 4096, 600_000
    part = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    part[-2:] = torch.tensor([[5.0], [6.0]], dtype=torch.bfloat16, device="cuda")
    table = torch.ones(3, width, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
    row_map = ops.RowMap.from_ranges(rows, [rows - 3], [rows - 2], [rows - 2], pool_rows=rows)
    out = ops.assemble_embeddings(ids, table, [part], row_map)
    assert out[-4:, 0].tolist() == [1.0, 5.0, 6.0, 1.0]
    assert bool((out[-4:] == out[-4:, :1]).all())


def test_all_pairs_of_dtypes_are_cast_once():
    for table_dtype, part_dtype in itertools.product(DTYPES, DTYPES):
        ids, table, parts, row_map = draw(6, 40, 24, (30,), (part_dtype,), table_dtype, (0,))
        expected = ops.assemble_embeddings(ids, table, parts, row_map)
        got = ops.assemble_embeddings(ids.cuda(), table.cuda(), [parts[0].cuda()], row_map)
        assert torch.equal(got.cpu(), expected)
