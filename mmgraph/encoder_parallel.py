"""Weights of an encoder's attention split by heads over the ranks of a process group.

Each rank holds whole heads: its rows of the q, k and v projections, and the columns of the output projection that read
them. Outputs are summed over the ranks, gradients of the input likewise. One rank alone is the same code without sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmgraph.errors import EncoderAttentionError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of q, heads of k and v, and the width of each."""

    q: int
    kv: int
    width: int

    @property
    def sections(self) -> list[int]:
        """Columns of q, k and v in the packed projection."""
        return [self.q * self.width, self.kv * self.width, self.kv * self.width]


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Which part of the heads this process has.

    Attributes:
        rank: Its place in the group.
        size: Ranks in the group; 1 where nothing is split.
        group: The group's name, by which collectives find it, also in a traced graph.
    """

    rank: int = 0
    size: int = 1
    group: str = ""

    def local(self, heads: HeadCounts) -> HeadCounts:
        """This rank's counts.

        Raises:
            EncoderAttentionError: The ranks don't divide the heads.
        """
        for name, count in (("num_heads", heads.q), ("num_kv_heads", heads.kv)):
            if count % self.size:
                raise EncoderAttentionError(
                    f"{name} must be divisible by the ranks that share the heads, got {count} heads for {self.size} "
                    "ranks: use a smaller group, or leave process_group and device_mesh away to keep whole weights."
                )
        return HeadCounts(heads.q // self.size, heads.kv // self.size, heads.width)

    def rows_of(self, part: Tensor, rows: int) -> Tensor:
        """This rank's ``rows`` rows of q's, k's or v's whole weight or bias."""
        return part.narrow(0, self.rank * rows, rows)

    def qkv(self, packed: Tensor, heads: HeadCounts) -> Tensor:
        """This rank's rows of a whole weight or bias with rows q | k | v, as a tensor of its own."""
        parts = packed.split(heads.sections)
        local = self.local(heads).sections
        return torch.cat([self.rows_of(part, rows) for part, rows in zip(parts, local, strict=True)])

    def columns(self, weight: Tensor, columns: int) -> Tensor:
        """This rank's ``columns`` columns of the whole output projection, as a tensor of its own."""
        return weight.narrow(1, self.rank * columns, columns).clone(memory_format=torch.contiguous_format)


def find_shard(process_group: Any, device_mesh: Any) -> WeightShard:
    """The part of this process in a group or one-dimensional mesh; everything where neither is given.

    Raises:
        EncoderAttentionError: Both are given, one is of the wrong kind, or this process isn't in it.
    """
    if process_group is None and device_mesh is None:
        return WeightShard()
    if process_group is not None and device_mesh is not None:
        raise EncoderAttentionError(
            "process_group and device_mesh both say who shares the weights: give one of them."
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise EncoderAttentionError(
            "weights are to be shared over ranks, but torch.distributed isn't initialised: call "
            "torch.distributed.init_process_group first."
        )
    group = process_group if device_mesh is None else _group_of_mesh(device_mesh)
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise EncoderAttentionError(
            f"process_group must be a torch.distributed.ProcessGroup that has this process, got {group!r}: make the "
            "module on members of the group only, each with its own group."
        )
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise EncoderAttentionError("this process isn't in process_group: make the module on its members only.")
    return WeightShard(rank, size, str(group.group_name)) if size > 1 else WeightShard()


def _group_of_mesh(mesh: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise EncoderAttentionError(f"device_mesh must be a DeviceMesh, got {type(mesh).__name__}.")
    if mesh.ndim != 1:
        raise EncoderAttentionError(
            f"device_mesh must have one dimension, got {mesh.ndim} ({mesh.mesh_dim_names}): pass the one that shares "
            "the weights, as in mesh['tp']."
        )
    return mesh.get_group()


def make_projections(
    embed_dim: int,
    heads: HeadCounts,
    shard: WeightShard,
    *,
    qkv_bias: bool,
    proj_bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[nn.Linear, nn.Linear, nn.Parameter | None]:
    """The packed and the output projection of this rank, and, where weights are split, the output's whole bias.

    Whole layers are made first and then cut, so that ranks with one seed start as one process with it would.

    Returns:
        ``Linear(embed_dim, q | k | v)``, ``Linear(heads, embed_dim)``, and a bias to be added once after the sum, which
        the second layer then doesn't have.
    """
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    qkv = nn.Linear(embed_dim, sum(heads.sections), bias=qkv_bias, **options)
    proj = nn.Linear(heads.sections[0], embed_dim, bias=proj_bias, **options)
    if shard.size == 1:
        return qkv, proj, None
    local = shard.local(heads)
    with torch.no_grad():
        own_qkv = nn.Linear(embed_dim, sum(local.sections), bias=qkv_bias, device="meta", dtype=dtype)
        own_qkv.weight = nn.Parameter(shard.qkv(qkv.weight, heads))
        if qkv_bias:
            own_qkv.bias = nn.Parameter(shard.qkv(qkv.bias, heads))
        own_proj = nn.Linear(local.sections[0], embed_dim, bias=False, device="meta", dtype=dtype)
        own_proj.weight = nn.Parameter(shard.columns(proj.weight, local.sections[0]))
    return own_qkv, own_proj, nn.Parameter(proj.bias.detach()) if proj_bias else None


def enter_shards(x: Tensor, shard: WeightShard) -> Tensor:
    """``x``, whose gradient is summed over the ranks, since each one's heads read all of it."""
    if shard.size == 1 or not torch.is_grad_enabled():
        return x
    entered: Tensor = _SumGradients.apply(x, shard.group)
    return entered


def sum_over_shards(x: Tensor, shard: WeightShard) -> Tensor:
    """The sum of the ranks' ``x``, the same on each; its gradient goes to each as it is."""
    if shard.size == 1:
        return x
    if not torch.is_grad_enabled():
        return _all_reduce(x, shard.group)
    summed: Tensor = _SumOutputs.apply(x, shard.group)
    return summed


def _all_reduce(x: Tensor, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    summed: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    return summed


# PyTorch's functional all-reduce has no gradient that says which side is replicated, so both sides are said here.
class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        summed = _all_reduce(x, group)
        # A view: else a traced graph that is run eagerly has the collective's own gradient, zero, with torch 2.11.
        return summed.view_as(summed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
