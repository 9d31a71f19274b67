"""Embedding assembly: text rows from a table, other rows from a pool, one launch, no concatenation."""

from mmgraph.ops import registration as _registration
from mmgraph.ops.assembly import backward as _backward
from mmgraph.ops.assembly import backward_cuda as _backward_cuda
from mmgraph.ops.assembly import cuda as _cuda
from mmgraph.ops.assembly import reference as _reference
from mmgraph.ops.checks import gradient_free as _gradient_free

for _name, _cpu, _gpu in (
    ("assemble_embeddings", _reference.assemble, _cuda.assemble),
    ("merge_embeddings", _reference.merge, _cuda.merge),
    ("deepstack_add", _reference.deepstack_add, _cuda.deepstack_add),
):
    _registration.implement(f"{_name}_autograd", cpu=_cpu, cuda=_gpu)
    _registration.implement(_name, cpu=_gradient_free(_name, _cpu), cuda=_gradient_free(_name, _gpu))
_registration.implement("assemble_embeddings_out", cpu=_reference.assemble_out, cuda=_cuda.assemble_out)
_registration.implement(
    "deepstack_add_", cpu=_reference.deepstack_add_in_place, cuda=_cuda.deepstack_add_in_place
)
_registration.implement("store_rows", cpu=_reference.store_rows, cuda=_cuda.store_rows)
_registration.implement("expand_ranges", cpu=_reference.expand_ranges, cuda=_cuda.expand_ranges)
for _name, _cpu_gradient, _gpu_gradient in (
    ("assemble_embeddings_backward", _backward.assemble_backward, _backward_cuda.assemble_backward),
    ("merge_embeddings_backward", _backward.merge_backward, _backward_cuda.merge_backward),
    ("deepstack_add_backward", _backward.deepstack_backward, _backward_cuda.deepstack_backward),
):
    _registration.implement(_name, cpu=_cpu_gradient, cuda=_gpu_gradient)
    _registration.once_differentiable(_name)
_registration.differentiate(
    "assemble_embeddings_autograd", _backward.differentiate_assemble, _backward.setup_assemble
)
_registration.differentiate("merge_embeddings_autograd", _backward.differentiate_merge, _backward.setup_merge)
_registration.differentiate(
    "deepstack_add_autograd", _backward.differentiate_deepstack, _backward.setup_deepstack
)

from mmgraph.ops.assembly.api import (  # noqa: E402 - after registration: it looks the ops up
    assemble_embeddings,
    assemble_embeddings_out,
    deepstack_add,
    deepstack_add_,
    expand_ranges,
    merge_embeddings,
    store_rows,
)

__all__ = [
    "assemble_embeddings",
    "assemble_embeddings_out",
    "deepstack_add",
    "deepstack_add_",
    "expand_ranges",
    "merge_embeddings",
    "store_rows",
]
