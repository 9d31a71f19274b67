"""Invariant: every op keeps its contract: opcheck passes, and the fake's strides are the real ones.

Samples vary layout (contiguous, sliced, transposed), sizes (none, one, some) and gradients.
"""

import itertools
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmgraph.ops import schemas
from mmgraph.ops.attention.registry import backend_names

N = torch.ops.mmgraph


def matrix(rows, width, layout="plain", dtype=torch.float32, grad=False):
    g = torch.Generator().manual_seed(rows * 31 + width)
    if layout == "sliced":
        made = torch.randn(rows, width + 2, generator=g).to(dtype)[:, 1 : 1 + width]
    elif layout == "transposed":
        made = torch.randn(width, rows, generator=g).to(dtype).t()
    else:
        made = torch.randn(rows, width, generator=g).to(dtype)
    return made.requires_grad_(grad)


def heads(tokens, count, width, layout="plain", grad=False):
    g = torch.Generator().manual_seed(tokens * 31 + width)
    if layout == "sliced":
        made = torch.randn(tokens, count + 2, width, generator=g)[:, 1 : 1 + count]
    elif layout == "transposed":
        made = torch.randn(count, width, tokens, generator=g).permute(2, 0, 1)
    else:
        made = torch.randn(tokens, count, width, generator=g)
    return made.requires_grad_(grad)


IDS = torch.tensor([0, 2, 99, 1, 1])
MAP = torch.tensor([-1, 0, 2, 2, -1], dtype=torch.int32)
MASK = torch.tensor([True, False, False, True, False])
PLACES = torch.tensor([3, -1, 0, 1, -1], dtype=torch.int32)
RANGES = torch.tensor([[0, 1, 7], [3, 5, 0], [2**31 - 1] * 3], dtype=torch.int32)
CU = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
LAYOUTS = ("plain", "sliced", "transposed")


def rotary_samples():
    counts = (4, 2, 6)
    for layout, tables, norms in itertools.product(LAYOUTS, (3, 6, None), (False, True)):
        cos, sin = (None if tables is None else matrix(5, tables, layout, torch.float64) for _ in range(2))
        weights = [matrix(6, 1, layout)[:, 0] if norms else None for _ in range(2)]
        rest = (cos, sin, *weights, *counts, layout == "sliced", 1e-6)
        qkv = matrix(5, 48, layout, torch.bfloat16)
        yield "packed_qkv_rope", (qkv, *rest), {}
        yield "packed_qkv_rope_copy", (qkv, *rest), {}
        yield "packed_qkv_rope_autograd", (matrix(5, 48, layout, grad=True), *rest), {}
        if norms:
            wanting = [x.clone().requires_grad_() for x in weights]
            yield "packed_qkv_rope_autograd", (matrix(5, 48, layout), cos, sin, *wanting, *rest[4:]), {}
        if layout != "transposed" and (norms or tables):
            yield "packed_qkv_rope_", (qkv.clone() if layout == "plain" else qkv, *rest), {}
        grads = (heads(5, 4, 6, layout), heads(5, 2, 6, layout), heads(5, 2, 6).mean().expand(5, 2, 6))
        kept = matrix(5, 48, layout) if norms else None
        yield "packed_qkv_rope_backward", (*grads, kept, cos, sin, *weights, False, 1e-6, layout == "plain"), {}
    none, table = matrix(0, 48), matrix(0, 3)
    yield "packed_qkv_rope", (none, table, table, None, None, *counts, False, 1e-6), {}
    yield "packed_qkv_rope_", (none, table, table, None, None, *counts, False, 1e-6), {}


def rowwise_samples():
    for layout, dtype in zip(LAYOUTS, (torch.float32, torch.bfloat16, torch.float64), strict=True):
        x, weight = matrix(5, 4, layout, dtype), matrix(4, 1, layout, dtype)[:, 0]
        yield "add_norm", (x, matrix(5, 4, dtype=dtype), weight, weight, 1e-6, "layer"), {}
        yield "add_norm", (matrix(5, 4, dtype=dtype), x, None, None, 1e-6, "rms"), {}
        yield "norm", (x, weight, None, 1e-6, "layer"), {}
        yield "activation", (x, "gelu"), {}
        yield "gated_activation", (x, "quick_gelu"), {}
        places, shares = IDS[:, None].clamp(max=4).expand(5, 2), matrix(5, 2, layout)
        yield "mix_rows", (x, places, shares, None), {}
        yield "mix_rows", (x, places.int(), shares, matrix(5, 4, layout)), {}
    none, one = matrix(0, 4), torch.ones(4).as_strided((1, 4), (1, 1))  # a single row's stride may be anything
    yield "add_norm", (none, none, None, None, 1e-6, "rms"), {}
    yield "add_norm", (one, one, None, None, 1e-6, "rms"), {}
    yield "norm", (one, None, None, 1e-6, "layer"), {}
    yield "activation", (one, "silu"), {}
    yield "gated_activation", (none, "silu"), {}
    yield "gated_activation", (one, "silu"), {}
    yield "mix_rows", (one, one[:, :2].long() * 0, one[:, :2], one), {}
    yield "mix_rows", (matrix(3, 4), none.long(), none, None), {}


def samples():
    for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        table, pool = matrix(4, 3, layout), matrix(3, 3, layout, dtype)
        yield "assemble_embeddings", (IDS, table, pool, MAP, False), {}
        yield "assemble_embeddings_out", (IDS, table, pool, MAP, False), {"out": matrix(5, 3, layout)}
        yield "merge_embeddings", (matrix(5, 3, layout), MASK, matrix(2, 3, layout, dtype), None), {}
        yield "deepstack_add", (matrix(5, 3, layout), matrix(3, 6, layout, dtype), MAP, 1), {}
        grads = (matrix(4, 3, layout, grad=True), matrix(3, 3, layout, dtype, grad=True))
        yield "assemble_embeddings_autograd", (IDS.int(), *grads, MAP, False), {}
        embeds, features = matrix(5, 3, layout, grad=True), matrix(2, 3, layout, dtype, grad=True)
        yield "merge_embeddings_autograd", (embeds, MASK, features, 2), {}
        hidden, deep = matrix(5, 3, layout, grad=True), matrix(3, 6, layout, dtype, grad=True)
        yield "deepstack_add_autograd", (hidden, deep, MAP, 1), {}
        backward = (matrix(5, 3, layout), IDS, MAP, 4, 3, torch.float32, dtype, True, layout == "plain")
        yield "assemble_embeddings_backward", backward, {}
        yield "merge_embeddings_backward", (matrix(5, 3, layout), MASK, 2, dtype), {}
        yield "deepstack_add_backward", (matrix(5, 3, layout), MAP, 1, 3, 6, dtype), {}
        yield "deepstack_add_", (matrix(5, 3, layout).clone(), matrix(3, 6, layout, dtype), MAP, 1), {}
        out = matrix(4, 3, "plain" if layout == "transposed" else layout)
        yield "store_rows", (matrix(5, 3, layout, dtype), PLACES), {"out": out}
    yield "expand_ranges", (RANGES, 6), {}
    none = torch.empty(0, dtype=torch.int32)
    yield "assemble_embeddings", (none, matrix(4, 3), matrix(0, 3), none, False), {}
    yield "merge_embeddings", (matrix(0, 3), none.bool(), matrix(0, 3), 0), {}
    yield "deepstack_add", (matrix(0, 3), matrix(0, 3), none, 0), {}
    yield "deepstack_add_", (matrix(0, 3), matrix(0, 3), none, 0), {}
    yield "store_rows", (matrix(0, 3), none), {"out": matrix(2, 3)}
    yield "expand_ranges", (RANGES[:0], 0), {}
    for layout, causal in itertools.product(LAYOUTS, (False, True)):
        q, k, v = heads(6, 4, 8, layout), heads(6, 2, 8, layout), heads(6, 2, 5, layout)
        for name in ("varlen_attention", "attn_reference"):
            yield name, (q, k, v, CU, 3, None, causal), {}
        wanting = [x.detach().requires_grad_() for x in (q, k, v)]
        yield "varlen_attention_lse", (*wanting, CU, 4, 0.5, causal, "reference"), {}
        yield "varlen_attention_lse", (*wanting, CU, 3, None, causal, ""), {}
        out, lse = N.varlen_attention_lse(q, k, v, CU, 3, None, causal, "")
        grad = heads(6, 4, 5, layout)
        yield "varlen_attention_backward", (grad, q, k, v, out, lse, CU, 3, None, causal), {}
    yield from rotary_samples()
    yield from rowwise_samples()
    yield "varlen_attention", (heads(0, 2, 4), heads(0, 2, 4), heads(0, 2, 4), CU[:1], 0, None, False), {}


SAMPLES = list(samples())
IDENTITIES = [f"{name}-{i}" for i, (name, _, _) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("name", "arguments", "keywords"), SAMPLES, ids=IDENTITIES)
def test_opcheck_passes(name, arguments, keywords):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(getattr(N, name).default, arguments, keywords, test_utils=checks)


def traced_samples():
    """All of an op's, or every fifth of more than eight: five goes round layouts, tables and weights alike."""
    for name in dict.fromkeys(name for name, _, _ in SAMPLES):
        of_op = [sample for sample in zip(IDENTITIES, SAMPLES, strict=True) if sample[1][0] == name]
        yield from of_op[:: 5 if len(of_op) > 8 else 1]


@pytest.mark.parametrize(
    ("name", "arguments", "keywords"), [pytest.param(*sample, id=i) for i, sample in traced_samples()]
)
def test_opcheck_passes_while_traced(name, arguments, keywords):
    """Four times as dear as the other checks together."""
    torch.library.opcheck(
        getattr(N, name).default, arguments, keywords, test_utils=["test_aot_dispatch_dynamic"]
    )


@pytest.mark.parametrize(("name", "arguments", "keywords"), SAMPLES, ids=IDENTITIES)
def test_the_fakes_layout_is_the_real_one(name, arguments, keywords):
    op = getattr(N, name).default
    with torch.no_grad():
        real = op(*arguments, **keywords)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake_arguments = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            fake_keywords = {key: mode.from_tensor(x) for key, x in keywords.items()}
            fake = op(*fake_arguments, **fake_keywords)
    if real is None:
        assert fake is None
        return
    pairs = [(real, fake)] if isinstance(real, torch.Tensor) else list(zip(real, fake, strict=True))
    for a, b in pairs:
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        inputs = {
            x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor) and x.numel()
        }
        assert a.numel() == 0 or a.untyped_storage().data_ptr() not in inputs


def test_every_op_has_samples():
    defined = {spec.name for spec in schemas._SPECS} | {f"attn_{name}" for name in backend_names()}
    sampled = {name for name, _, _ in SAMPLES}
    # The others need a GPU, and are checked there with the same samples' shapes.
    on_gpus = ("triton", "fa2", "fa3", "fa4", "torch", "flashinfer_cudnn")
    assert defined - sampled == {f"attn_{name}" for name in on_gpus}


@pytest.mark.parametrize("spec", schemas._SPECS, ids=lambda spec: spec.name)
def test_integers_that_change_from_batch_to_batch_are_symbolic(spec):
    plain = set(re.findall(r"\bint\??\s+(\w+)", spec.signature))
    # The model's constants.
    assert plain <= {"level", "pool_width", "num_heads", "num_kv_heads", "head_dim"}
