"""Invariant: every backend is accounted for; a broken package is an error and never a quiet fallback."""

import importlib.util
import sys
import types

import pytest
import torch

from mmgraph import ops
from mmgraph.ops.attention import api, fa2, order, registry, triton_backend
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.attention.triton_backend import block_table, padded_width

GPU = Traits(torch.device("cuda", 0), torch.bfloat16, 80, 80, 16, 16)


@pytest.fixture(autouse=True)
def fresh_answers():
    registry.forget_choices()
    fa2._package.cache_clear()
    triton_backend.triton_package.cache_clear()
    order._is_hopper.cache_clear()
    yield
    registry.forget_choices()
    fa2._package.cache_clear()
    triton_backend.triton_package.cache_clear()
    order._is_hopper.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Answer as on an H200 with its flash attention, without one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else None)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))


def test_the_cpu_has_the_reference_and_reasons_for_the_rest():
    reports = {r.name: r for r in ops.explain_backends(device="cpu")}
    assert list(reports) == ["fa2", "triton", "reference"]
    assert reports["reference"].usable
    assert reports["reference"].reason == "usable"
    assert not reports["fa2"].usable
    assert "NVIDIA GPU" in reports["fa2"].reason
    assert ops.select_backend(device="cpu") == "reference"
    assert ops.select_backend(device="cpu", backend="reference") == "reference"


def test_the_order_follows_the_sequence_shape(gpu):
    assert order.choose(GPU, 64).name == "triton"
    assert order.choose(GPU, 256).name == "fa2"
    assert order.choose(GPU, 4096).name == "triton"
    broad = Traits(GPU.device, torch.bfloat16, 256, 256, 16, 16)
    assert order.choose(broad, 4096).name == "fa2"
    single = Traits(GPU.device, torch.float32, 80, 80, 16, 16)
    assert order.choose(single, 4096).name == "triton"
    double = Traits(GPU.device, torch.float64, 80, 80, 16, 16)
    assert order.choose(double, 4096).name == "reference"
    wide = Traits(GPU.device, torch.bfloat16, 320, 80, 16, 16)
    assert order.choose(wide, 4096).name == "reference"


def test_other_architectures_keep_fa2_until_they_are_measured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert order.choose(GPU, 4096).name == "fa2"
    assert order.choose(GPU, 64).name == "triton"


def test_old_gpus_have_the_reference(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert list(registry.usable_backends(GPU)) == ["reference"]
    assert "8.0" in {r.name: r for r in registry.reports(GPU)}["fa2"].reason


def test_a_broken_package_is_an_error_everywhere_but_in_the_account(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # "installed"
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # and its import fails
    with pytest.raises(ops.BrokenBackend, match="flash_attn is installed but can't be imported"):
        order.choose(GPU, 4096)
    with pytest.raises(ops.BrokenBackend, match="reinstall it"):
        registry.require_backend("fa2", GPU)
    report = {r.name: r for r in registry.reports(GPU)}["fa2"]
    assert not report.usable
    assert report.reason.startswith("broken: flash_attn")
    # The CPU doesn't need the package, and goes on working.
    assert ops.select_backend(device="cpu") == "reference"


def test_without_flash_attn_and_torchs_copy_there_is_a_reason(gpu, monkeypatch):
    assert fa2.source() == "torch"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "isn't installed" in {r.name: r for r in registry.reports(GPU)}["fa2"].reason


def test_without_triton_only_the_reference_is_left(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(registry.usable_backends(GPU)) == ["reference"]
    for report in registry.reports(GPU)[:2]:
        assert "triton isn't installed" in report.reason


@pytest.fixture
def extra(monkeypatch):
    """A backend without a gradient, added as a user of the registry would."""

    def forward(q, k, v, cu_seqlens, max_seqlen, scale, causal, with_lse):
        return q.new_zeros((q.shape[0], q.shape[1], v.shape[2])), None

    record = AttentionBackend("extra", forward, lambda traits: None, supports_gradient=False)
    table = {"extra": record, **registry._table()}
    monkeypatch.setattr(registry, "_table", lambda: table)
    monkeypatch.setitem(api._named, "extra", torch.ops.mmgraph.attn_reference.default)


def test_a_gradient_asked_of_a_backend_without_one_is_its_own_error(extra):
    q = torch.randn(4, 2, 8, requires_grad=True)
    kv, cu = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(
        ops.GradientError, match=r"'extra' has no gradient.*name one that has: fa2, triton, reference"
    ):
        ops.varlen_attention(q, kv, kv, cu, 4, backend="extra")
    with pytest.raises(ops.GradientError):
        ops.select_backend(device="cpu", gradient=True, backend="extra")
    assert ops.select_backend(device="cpu", gradient=True) == "reference"
    reasons = {r.name: r.reason for r in ops.explain_backends(device="cpu", gradient=True)}
    assert reasons["extra"] == "it has no gradient"
    ops.varlen_attention(q, kv, kv, cu, 4).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("width", range(1, 257))
def test_tiles_are_the_least_power_of_two_that_holds_the_width(width):
    padded = padded_width(width)
    assert padded >= max(16, width)
    assert padded & (padded - 1) == 0
    assert padded == 16 or padded < 2 * width


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_blocks_fit_in_shared_memory(item_size, shared):
    for width in (16, 64, 80, 96, 128, 256):
        for longest in (64, 4096):
            blocks = block_table(item_size, width, longest, shared)
            padded = padded_width(width)
            held = padded * item_size * (blocks.queries + 2 * blocks.stages * blocks.keys)
            assert held <= shared, (width, blocks)
