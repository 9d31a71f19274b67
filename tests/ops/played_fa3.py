"""Calls the fa3 backend with a registered op of FlashAttention 3's schema behind it; fails on a wrong argument.

Started by test_fa3_arguments.py in a process of its own. Each way to play the package is a fork of it: an op can't be
registered twice, and PyTorch takes seconds to import.
"""

import os
import sys
import types
from unittest import mock

import torch

from mmgraph.ops import packages
from mmgraph.ops.attention import fa3, flash_shared, reference

MODULES = {
    "fa3_fwd": ("fa3_fwd_interface", "fa3_fwd_config"),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_config"),
}

# As FlashAttention 3 registers it.
SCHEMA = """fwd(
    Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None,
    Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,
    Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None,
    int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None,
    Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None,
    Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False,
    int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0,
    bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0,
    bool? pack_gqa = None, int sm_margin = 0
) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
# Another order, as another release may have it; q's place too.
TURNED = """fwd(
    Tensor k, Tensor v, Tensor q, bool is_causal = True, int num_splits = 7, float? softmax_scale = None,
    int window_size_left = -1, int? max_seqlen_k = None, int? max_seqlen_q = None, Tensor? cu_seqlens_k = None,
    Tensor? cu_seqlens_q = None, float softcap = 0.5
) -> (Tensor, Tensor)"""
OURS = set(fa3._ARGUMENTS)


def play(seen, names, count):
    """The op's implementation: it notes what every argument got."""

    def fwd(*arguments):
        got = dict(zip(names, arguments, strict=False))
        seen.append(got)
        q, k, v = got["q"], got["k"], got["v"]
        out, lse = reference.forward(
            q, k, v, got["cu_seqlens_q"], got["max_seqlen_q"], got["softmax_scale"], got["is_causal"], True
        )
        return (out, lse, *(q.new_zeros(0) for _ in range(count - 2)))

    return fwd


def check(schema, namespace, library):
    library.define(" ".join(schema.split()))
    registered = getattr(torch.ops, namespace).fwd.default._schema
    names = [argument.name for argument in registered.arguments]
    seen, tails = [], []
    library.impl("fwd", play(seen, names, len(registered.returns)), "CPU")
    assert fa3._build().name == MODULES[namespace][0]

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=g) for heads in (4, 2, 2))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def close_tail(out, *rest):
        tails.append(rest)
        out[int(cu[-1]) :] = 0

    with mock.patch.object(flash_shared, "close_tail", close_tail):
        for scale, causal in ((0.3, False), (0.125, True)):
            out, lse = fa3.forward(q, k, v, cu, 4, scale, causal, True)
            expected = reference.forward(q, k, v, cu, 4, scale, causal, True)
            torch.testing.assert_close(out, expected[0])
            torch.testing.assert_close(lse, expected[1])
            got = seen.pop()
            for name, value in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu), ("cu_seqlens_k", cu)):
                assert got[name].data_ptr() == value.data_ptr(), name
            assert got["max_seqlen_q"] == got["max_seqlen_k"] == 4
            assert got["softmax_scale"] == scale
            assert got["is_causal"] is causal
            assert got["num_splits"] == 1
            for argument in registered.arguments[: len(got)]:
                if argument.name not in OURS:
                    assert got[argument.name] == argument.default_value, argument.name
            assert len(tails) == 1
            assert tails.pop()[-2:] == (scale, causal)


def play_package(namespace, schema):
    """The package that has the namespace, and no other, with an op of that schema."""
    for name in MODULES[namespace]:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[MODULES[namespace][1]].CONFIG = {"build_flags": {}}
    packages.is_installed = lambda name: name == MODULES[namespace][0]
    check(schema, namespace, torch.library.Library(namespace, "DEF"))
    print(namespace, "placed", flush=True)


if __name__ == "__main__":
    for namespace, schema in (("fa3_fwd", SCHEMA), ("flash_attn_3", SCHEMA), ("fa3_fwd", TURNED)):
        if not (child := os.fork()):
            play_package(namespace, schema)
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
