"""Invariant: an encoder's attention is what plain PyTorch gives sequence by sequence, for every way of calling it.

Wrong arguments are refused with a reason, and leave the module as it was.
"""

import copy
import logging

import pytest
import torch
from encoder_reference import (
    LENGTHS,
    POSITIONS,
    draw_lengths,
    length_arguments,
    plain_attention,
    positions,
    shift_by_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tower_block import assert_right

import mmgraph
from mmgraph import MultimodalEncoderAttention, VisionAttention
from mmgraph.encoder_choice import forget_notes
from mmgraph.errors import EncoderAttentionError
from mmgraph.ops import ArgumentError, GradientError, UnknownBackend, UnusableBackend, attention_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pick(g, *choices):
    return choices[int(torch.randint(0, len(choices), (), generator=g))]


def drawn_case(seed, kind, form, dtypes=DTYPES):
    """A module, its input, arguments, lengths, and what positions do to q and k."""
    g = torch.Generator().manual_seed(seed)
    batch, seq = pick(g, 0, 1, 2, 3), pick(g, 0, 1, 4, 7)
    flat = pick(g, True, False)
    tokens = seq if flat else batch * seq
    heads, kv_heads, width = pick(g, (4, 4, 8), (4, 2, 6), (3, 1, 4), (1, 1, 2))
    dtype = pick(g, *dtypes)
    made = positions(kind, tokens, width, g)
    torch.manual_seed(seed)
    module = MultimodalEncoderAttention(
        heads * 5,
        heads,
        head_size=width,
        num_kv_heads=kv_heads,
        qkv_bias=pick(g, True, False),
        proj_bias=pick(g, True, False),
        scale=pick(g, None, 0.7, -0.4, 0),
        dtype=dtype,
        **made.options,
    )
    x = torch.randn((seq,) if flat else (batch, seq), generator=g)[..., None]
    x = (x * torch.randn(heads * 5, generator=g)).to(dtype)
    lengths = [seq] * (1 if flat else batch) if form == "none" else draw_lengths(g, tokens)
    return module, x, length_arguments(form, module, lengths) | made.call, lengths, made


@pytest.mark.parametrize("form", LENGTHS)
@pytest.mark.parametrize("kind", POSITIONS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_equals_plain_attention(kind, form, seed):
    module, x, arguments, lengths, made = drawn_case(seed, kind, form)
    with torch.no_grad():
        got = module(x, **arguments)
        low = plain_attention(module, x, lengths, made.place, x.dtype)
        exact = plain_attention(module, x, lengths, made.place)
    assert_right(got, low, exact)


@pytest.mark.parametrize("kind", POSITIONS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**31))
def test_gradients_equal_those_of_plain_attention(kind, seed):
    module, x, arguments, lengths, made = drawn_case(seed, kind, "plain", (torch.float64,))
    x.requires_grad_()
    leaves = [x, *module.parameters()]
    found = []
    for out in (module(x, **arguments), plain_attention(module, x, lengths, made.place)):
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        found.append(torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def small(**options):
    torch.manual_seed(0)
    return MultimodalEncoderAttention(32, 4, **options)


def tables(tokens, columns=4):
    return torch.randn(tokens, columns), torch.randn(tokens, columns)


def test_the_two_names_are_one_class():
    assert mmgraph.VisionAttention is VisionAttention is MultimodalEncoderAttention


def test_padding_reaches_no_other_row_and_gets_the_bias():
    module, x = small(), torch.randn(9, 32)
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    clean = module(x, cu, 4, position_embeddings=tables(9))
    torch.manual_seed(5)
    embeddings = tables(9)
    clean = module(x, cu, 4, position_embeddings=embeddings)
    x[7:] = float("nan")
    dirty = module(x, cu, 4, position_embeddings=embeddings)
    assert torch.equal(clean, dirty)
    assert torch.equal(dirty[7:], module.proj.bias.expand(2, 32))


def test_batched_tables_are_those_of_its_rows():
    module, x = small(), torch.randn(2, 3, 32)
    cos, sin = tables(6)
    flat = module(x, position_embeddings=(cos, sin))
    assert torch.equal(module(x, position_embeddings=[cos.view(2, 3, 4), sin.view(2, 3, 4)]), flat)


def test_a_function_without_its_positions_does_not_run():
    def fail(*_):
        raise AssertionError("it ran")

    x, (cos, sin) = torch.randn(5, 32), tables(5)
    other, plain = small(position_function=fail), small()
    for call in ({}, {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}):
        assert torch.equal(other(x, **call), plain(x, **call))


class Doubling(nn.Module):
    """Stands for a projection that was quantised or adapted: it has no weight, and its results show that it ran."""

    def __init__(self, linear):
        super().__init__()
        self.inner = [linear]

    def forward(self, x):
        return self.inner[0](x) * 2


class Int8Weight(torch.Tensor):
    """Stands for a quantised weight: it can be multiplied with, and nothing else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, bias = args
        levels = torch.Tensor.as_subclass(weight, torch.Tensor)
        return nn.functional.linear(x, (levels * 16).round() / 16, bias)


def test_replaced_projections_are_what_runs():
    module, x = small(), torch.randn(6, 32)
    exact = copy.deepcopy(module)
    with torch.no_grad():
        for linear in (exact.qkv, exact.proj):
            linear.weight.mul_(2)
            linear.bias.mul_(2)
        module.qkv, module.proj = Doubling(module.qkv), Doubling(module.proj)
        torch.testing.assert_close(module(x), exact(x))


def test_weights_of_another_kind_are_what_runs():
    module, x = small(), torch.randn(6, 32)
    exact = copy.deepcopy(module)
    with torch.no_grad():
        for linear, other in ((module.qkv, exact.qkv), (module.proj, exact.proj)):
            other.weight.copy_((other.weight * 16).round() / 16)
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Int8Weight), requires_grad=False)
        torch.testing.assert_close(module(x), exact(x))
        assert not torch.allclose(exact(x), small()(x))


def test_a_replaced_projection_of_another_width_is_named():
    module = small()
    module.qkv = nn.Linear(32, 64)
    with pytest.raises(EncoderAttentionError, match=r"96 columns, q \| k \| v, got 64 from Linear"):
        module(torch.randn(3, 32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embed_dim": 30}, r"divisible by num_heads, got 30 and 4: pass head_size="),
        ({"num_heads": 0}, "num_heads must be a positive Python int, got 0"),
        ({"embed_dim": 32.0}, r"embed_dim must be a positive Python int, got 32.0"),
        ({"head_size": True}, "head_size must be a positive Python int, got True"),
        ({"num_kv_heads": 3}, "num_heads must be divisible by num_kv_heads, got 4 and 3"),
        ({"scale": float("nan")}, "scale must be a finite Python number or None, got nan"),
        ({"scale": "1"}, "scale must be a finite"),
        (
            {"position_mode": "rotary"},
            "one of 'rope', 'interleaved_rope', 'complex_rope', got 'rotary'",
        ),
        ({"position_function": 3}, r"function f\(q, k, positions, x_shape\) or None, got 3"),
        ({"position_mode": "complex_rope", "position_function": shift_by_table}, "give one"),
        ({"process_group": object()}, "torch.distributed isn't initialised"),
        ({"process_group": object(), "device_mesh": object()}, "give one of them"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(EncoderAttentionError, match=words):
        MultimodalEncoderAttention(**({"embed_dim": 32, "num_heads": 4} | options))


def test_unknown_keywords_and_backends_are_refused():
    with pytest.raises(TypeError, match="quant_config"):
        small(quant_config=None)
    with pytest.raises(TypeError, match="attention_mask"):
        small()(torch.randn(3, 32), attention_mask=None)
    with pytest.raises(UnknownBackend, match="'fastest'; choose one of"):
        small(backend="fastest")
    with pytest.raises(UnusableBackend, match="needs an NVIDIA GPU"):
        small(backend="fa2")(torch.randn(3, 32))


COS, SIN = tables(6)


@pytest.mark.parametrize(
    ("options", "call", "error", "words"),
    [
        ({}, {"x": torch.zeros(6, 31)}, EncoderAttentionError, r"\[seq, 32\], got \[6, 31\]"),
        ({}, {"x": torch.zeros(32)}, EncoderAttentionError, r"got \[32\]"),
        ({}, {"rotary_pos_emb_cos": COS}, EncoderAttentionError, "cos was given without rotary_pos_emb_sin"),
        ({}, {"rotary_pos_emb_sin": SIN}, EncoderAttentionError, "sin was given without rotary_pos_emb_cos"),
        (
            {},
            {"position_embeddings": (COS, None)},
            EncoderAttentionError,
            "cos of position_embeddings was given",
        ),
        ({}, {"position_embeddings": (COS, SIN, SIN)}, EncoderAttentionError, r"\(cos, sin\), got 3 values"),
        ({}, {"position_embeddings": (COS, 1)}, EncoderAttentionError, "must be a tensor, got a int"),
        ({}, {"position_embeddings": COS}, EncoderAttentionError, "a form of the model's own"),
        (
            {},
            {"position_embeddings": torch.complex(COS, SIN)},
            EncoderAttentionError,
            "complex table needs position_mode='complex_rope'",
        ),
        (
            {"position_mode": "complex_rope"},
            {"position_embeddings": (COS, SIN)},
            EncoderAttentionError,
            "one complex table",
        ),
        (
            {"position_mode": "complex_rope"},
            {"rotary_pos_emb_cos": COS, "rotary_pos_emb_sin": SIN},
            EncoderAttentionError,
            r"pass torch.complex\(cos, sin\)",
        ),
        ({}, {"position_embeddings": (COS[:5], SIN[:5])}, ArgumentError, "one row per token, 6, got 5"),
        (
            {"position_function": lambda q, k, p, s: (q, k, p)},
            {"position_embeddings": COS},
            EncoderAttentionError,
            r"the pair \(q, k\), got a tuple",
        ),
        (
            {"position_function": lambda q, k, p, s: (q, k.double())},
            {"position_embeddings": COS},
            EncoderAttentionError,
            "must return k as it came.*cast back to the dtype",
        ),
        (
            {"position_function": lambda q, k, p, s: (q.flatten(1), k)},
            {"position_embeddings": COS},
            EncoderAttentionError,
            "must return q as it came",
        ),
        (
            {},
            {"position_embeddings": (COS.clone().requires_grad_(), SIN)},
            GradientError,
            "tables have no gradient",
        ),
    ],
)
def test_wrong_calls_are_refused_and_the_next_is_right(options, call, error, words):
    module = small(**options)
    x, plain = torch.randn(6, 32), small()
    with pytest.raises(error, match=words):
        module(**({"x": x} | call))
    assert torch.equal(module(x), plain(x))


def test_one_log_line_for_each_choice_of_backend(caplog):
    forget_notes()
    x, automatic, asked = torch.randn(6, 32), small(), small(backend="reference")
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="mmgraph.encoder_attention"):
        for _ in range(3):
            automatic(x)
            small()(x[:4])  # another layer, another length, the same choice
            asked(x)
            with attention_backend("reference"):
                automatic(x)
    assert [record.getMessage().split(" for ", 1)[0] for record in caplog.records] == [
        "encoder attention: backend reference (automatic)",
        "encoder attention: backend reference (asked",
        "encoder attention: backend reference (asked",
    ]
    said = [record.getMessage() for record in caplog.records]
    assert "(asked for by backend=) for 4 heads of width 8" in said[1]
    assert "(asked for by attention_backend(...))" in said[2]


def test_a_failed_call_logs_no_choice(caplog):
    forget_notes()
    with caplog.at_level(logging.INFO, logger="mmgraph.encoder_attention"), pytest.raises(UnusableBackend):
        small(backend="fa3")(torch.randn(3, 32))
    assert caplog.records == []


def test_it_says_what_it_is():
    shown = repr(small(num_kv_heads=2, backend="reference"))
    assert "32, 4, head_size=8, num_kv_heads=2, position_mode='rope', backend='reference'" in shown


def test_tables_with_sequence_before_batch_are_refused_and_not_applied_to_the_wrong_rows():
    module = small()
    x = torch.randn(2, 6, 32)
    cos, sin = (torch.randn(2, 6, 4) for _ in range(2))
    right = module(x, position_embeddings=(cos, sin))
    with pytest.raises(
        EncoderAttentionError, match=r"must be \[batch, seq, width\] as x is, \[2, 6\].*transpose them"
    ):
        module(x, position_embeddings=(cos.transpose(0, 1), sin.transpose(0, 1)))
    flat = module(x, position_embeddings=(cos.flatten(0, 1), sin.flatten(0, 1)))
    one = module(x, position_embeddings=(cos.flatten(0, 1)[None], sin.flatten(0, 1)[None]))
    assert torch.equal(right, flat)
    assert torch.equal(right, one)
