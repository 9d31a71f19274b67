"""Invariant: an encoder's attention whose heads are split over processes is the one that isn't, and trains like it.

Two processes, of which this is one, run everything once and note what they found; the tests compare it with a module
that isn't split.
"""

import copy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmgraph import MultimodalEncoderAttention
from mmgraph.encoder_parallel import HeadCounts, WeightShard
from mmgraph.errors import EncoderAttentionError

RANKS = 2
LENGTHS = (4, 0, 7)


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    bias: bool


CASES = (Case(4, 4, True), Case(4, 2, True), Case(2, 2, False))


def make(case: Case, seed: int = 0, **options: Any) -> MultimodalEncoderAttention:
    torch.manual_seed(seed)
    return MultimodalEncoderAttention(
        20,
        case.heads,
        head_size=6,
        num_kv_heads=case.kv_heads,
        qkv_bias=case.bias,
        proj_bias=case.bias,
        dtype=torch.float64,
        **options,
    )


def call_of(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    g = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    return {
        "x": torch.randn(tokens, 20, generator=g, dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "max_seqlen": max(lengths),
        "position_embeddings": (torch.randn(tokens, 3, generator=g), torch.randn(tokens, 3, generator=g)),
    }


def trained(
    module: MultimodalEncoderAttention, run: Any, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, torch.Tensor]:
    """The output, and gradients of the input and of every parameter."""
    call = call_of(lengths)
    call["x"].requires_grad_()
    out = run(**call)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(out.square().sum(), [call["x"], *parameters])
    return {"out": out.detach(), **dict(zip(("x", *names), grads, strict=True))}


def refused(**options: Any) -> str:
    try:
        make(**options)
    except EncoderAttentionError as error:
        return str(error)
    return ""


def work(rank: int, folder: str) -> dict[Any, Any]:
    """What one process does; the other does the same at the same time."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    try:
        return results_of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def second(_: int, folder: str) -> None:
    """The other process."""
    torch.set_num_threads(1)
    torch.save(work(1, folder), Path(folder) / "found.pt")


def results_of(group: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in CASES:
        module = make(case, process_group=group)
        found[case, "state"] = copy.deepcopy(module.state_dict())
        found[case, "trained"] = trained(module, module)
        module.load_state_dict(make(case, seed=1).state_dict())
        with torch.no_grad():
            found[case, "loaded"] = module(**call_of())
        own = make(case, seed=2, process_group=group)
        own.load_state_dict(module.state_dict())
        pairs = zip(own.parameters(), module.parameters(), strict=True)
        found[case, "own"] = all(torch.equal(one, other) for one, other in pairs)

    case = CASES[0]
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    module = make(case, device_mesh=mesh["tp"])
    found["shown"] = repr(module)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    found["compiled"] = trained(module, compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found["compiled again"] = trained(module, compiled, (9, 3, 1, 8, 2))["out"]
    without_the_second = dist.new_group([0])
    found["refused"] = {
        "heads": refused(case=Case(3, 3, True), process_group=group),
        "kv heads": refused(case=Case(4, 1, True), process_group=group),
        "mesh": refused(case=case, device_mesh=mesh),
        "no mesh": refused(case=case, device_mesh=group),
        "no group": refused(case=case, process_group="tp"),
        "member": refused(case=case, process_group=without_the_second),
    }
    alone = make(case, device_mesh=mesh["dp"])
    found["alone"] = list(alone.state_dict())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    # One process is spared: each costs seconds of imports.
    other = torch.multiprocessing.spawn(second, args=(folder,), nprocs=1, join=False)
    first = work(0, folder)
    other.join()
    return [first, torch.load(f"{folder}/found.pt", weights_only=False)]


def part(name: str, value: torch.Tensor, module: MultimodalEncoderAttention, rank: int) -> torch.Tensor:
    """A rank's part of a whole parameter or of its gradient, found in another way than the library's."""
    heads, width = module.heads, module.heads.width
    if name.startswith("qkv"):
        by_head = value.unflatten(0, (-1, width))
        q, k, v = by_head.split([heads.q, heads.kv, heads.kv])
        return torch.cat([one.chunk(RANKS)[rank] for one in (q, k, v)]).flatten(0, 1)
    return value.chunk(RANKS, dim=1)[rank] if name == "proj.weight" else value


def whole_name(name: str) -> str:
    return "proj.bias" if name == "proj_bias" else name


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_one_seed_are_parts_of_one_module(found: list[dict[Any, Any]], case: Case) -> None:
    whole = make(case)
    for rank, results in enumerate(found):
        state = results[case, "state"]
        assert {whole_name(name) for name in state} == whole.state_dict().keys()
        for name, value in state.items():
            expected = part(name, whole.state_dict()[whole_name(name)], whole, rank)
            assert torch.equal(value, expected)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_one_processs(found: list[dict[Any, Any]], case: Case) -> None:
    whole = make(case)
    expected = trained(whole, whole)
    runs = [(rank, results[case, "trained"]) for rank, results in enumerate(found)]
    if case == CASES[0]:
        runs += [(rank, results["compiled"]) for rank, results in enumerate(found)]
    for rank, got in runs:
        assert {whole_name(name) for name in got} == expected.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, part(name, expected[whole_name(name)], whole, rank))
    assert torch.equal(found[0][case, "trained"]["out"], found[1][case, "trained"]["out"])


@pytest.mark.parametrize("case", CASES)
def test_a_whole_checkpoint_loads_on_every_rank_and_its_own_again(
    found: list[dict[Any, Any]], case: Case
) -> None:
    with torch.no_grad():
        expected = make(case, seed=1)(**call_of())
    for results in found:
        torch.testing.assert_close(results[case, "loaded"], expected)
        assert results[case, "own"]


def test_one_graph_sums_for_other_sizes_too(found: list[dict[Any, Any]]) -> None:
    with torch.no_grad():
        expected = make(CASES[0])(**call_of((9, 3, 1, 8, 2)))
    for results in found:
        torch.testing.assert_close(results["compiled again"], expected)


def test_what_cannot_be_split_is_refused(found: list[dict[Any, Any]]) -> None:
    for results in found:
        words = results["refused"]
        assert (
            "num_heads must be divisible by the ranks that share the heads, got 3 heads for 2" in words["heads"]
        )
        assert "num_kv_heads must be divisible by the ranks" in words["kv heads"]
        assert "one dimension, got 2 (('dp', 'tp')): pass the one" in words["mesh"]
        assert "device_mesh must be a DeviceMesh" in words["no mesh"]
        assert "process_group must be a torch.distributed.ProcessGroup" in words["no group"]
    assert "members of the group only" in found[1]["refused"]["member"]


def test_one_rank_alone_is_a_whole_module(found: list[dict[Any, Any]]) -> None:
    for rank, results in enumerate(found):
        assert f"rank {rank} of 2" in results["shown"]
        assert results["alone"] == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]


def test_parts_are_copies_and_together_the_whole() -> None:
    heads = HeadCounts(4, 2, 3)
    packed, out = torch.randn(24, 5), torch.randn(5, 12)
    parts = [WeightShard(rank, 2, "tp").qkv(packed, heads) for rank in range(2)]
    q, k, v = (torch.cat(both) for both in zip(*(one.split([6, 3, 3]) for one in parts), strict=True))
    assert torch.equal(torch.cat([q, k, v]), packed)
    columns = [WeightShard(rank, 2, "tp").columns(out, 6) for rank in range(2)]
    assert torch.equal(torch.cat(columns, 1), out)
    assert all(one.is_contiguous() and one.untyped_storage().nbytes() == 5 * 6 * 4 for one in columns)
