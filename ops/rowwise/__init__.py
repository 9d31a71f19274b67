"""What towers do between matrix products, row by row: norms after an addition, activations, mixtures of rows."""

from mmgraph.ops import registration as _registration
from mmgraph.ops.checks import gradient_free as _gradient_free
from mmgraph.ops.rowwise import cuda as _cuda
from mmgraph.ops.rowwise import dispatch as _dispatch
from mmgraph.ops.rowwise import reference as _reference

_cpu = _dispatch.implementations(_reference.BACKEND)
_gpu = _dispatch.implementations(_cuda.BACKEND)
for _name in ("add_norm", "norm", "activation", "gated_activation", "mix_rows"):
    _registration.implement(
        _name,
        cpu=_gradient_free(_name, getattr(_cpu, _name)),
        cuda=_gradient_free(_name, getattr(_gpu, _name)),
    )

from mmgraph.ops.rowwise.api import (  # noqa: E402 - after registration: it looks the ops up
    activation,
    add_norm,
    gated_activation,
    mix_rows,
    norm,
)

__all__ = ["activation", "add_norm", "gated_activation", "mix_rows", "norm"]
