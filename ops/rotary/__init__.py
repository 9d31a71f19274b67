"""Rotary positions on a packed projection: q and k in one pass, with their norms, out of place and in place."""

from mmgraph.ops import registration as _registration
from mmgraph.ops.rotary import cuda as _cuda
from mmgraph.ops.rotary import dispatch as _dispatch
from mmgraph.ops.rotary import reference as _reference

_cpu = _dispatch.implementations(_reference.BACKEND)
_gpu = _dispatch.implementations(_cuda.BACKEND)
_registration.implement("packed_qkv_rope", cpu=_cpu.rope, cuda=_gpu.rope)
_registration.implement("packed_qkv_rope_copy", cpu=_cpu.copy, cuda=_gpu.copy)
_registration.implement("packed_qkv_rope_autograd", cpu=_cpu.autograd, cuda=_gpu.autograd)
_registration.implement("packed_qkv_rope_", cpu=_cpu.in_place, cuda=_gpu.in_place)
_registration.implement("packed_qkv_rope_backward", cpu=_cpu.backward, cuda=_gpu.backward)
_registration.once_differentiable("packed_qkv_rope_backward")
_registration.differentiate("packed_qkv_rope_autograd", _dispatch.differentiate, _dispatch.setup_context)

from mmgraph.ops.rotary.api import packed_qkv_rope, packed_qkv_rope_  # noqa: E402 - after registration: it looks the ops up

__all__ = ["packed_qkv_rope", "packed_qkv_rope_"]
