"""Varlen attention: one op per backend, one op that chooses, one backward."""

from mmgraph.ops import registration as _registration
from mmgraph.ops.attention import dispatch as _dispatch
from mmgraph.ops.attention.registry import backend_names as _backend_names
from mmgraph.ops.attention.settings import MEASURE as _MEASURE
from mmgraph.ops.schemas import attention_backend_spec as _attention_backend_spec

for _name in (*_backend_names(), _MEASURE):
    _registration.define(_attention_backend_spec(_name))
    _run = _dispatch.attention_by(f"attn_{_name}", _name)
    _registration.implement(f"attn_{_name}", cpu=_run, cuda=_run)
for _name, _function in (
    ("varlen_attention", _dispatch.attention_by("varlen_attention", None)),
    ("varlen_attention_lse", _dispatch.attention_lse),
    ("varlen_attention_backward", _dispatch.attention_backward),
):
    _registration.implement(_name, cpu=_function, cuda=_function)
_registration.once_differentiable("varlen_attention_backward")
_registration.differentiate("varlen_attention_lse", _dispatch.differentiate, _dispatch.setup_context)

from mmgraph.ops.attention.api import varlen_attention  # noqa: E402 - after registration: it looks the ops up
from mmgraph.ops.attention.order import explain_backends, select_backend  # noqa: E402
from mmgraph.ops.attention.registry import BackendReport  # noqa: E402
from mmgraph.ops.attention.settings import attention_backend  # noqa: E402

__all__ = ["BackendReport", "attention_backend", "explain_backends", "select_backend", "varlen_attention"]
