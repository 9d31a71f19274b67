"""Invariant: every backend is accounted for; a broken package is an error and never a quiet fallback."""

import sys

import pytest
import torch
from pretended import forget_answers, pretend_gpu, pretend_installed

from mmgraph import ops
from mmgraph.ops.attention import api, fa2, fa3, fa4, order, registry
from mmgraph.ops.attention.registry import AttentionBackend, Traits
from mmgraph.ops.attention.triton_backend import block_table
from mmgraph.ops.attention.zero_tail import padded_power

GPU = Traits(torch.device("cuda", 0), torch.bfloat16, 80, 80, 16, 16)


@pytest.fixture(autouse=True)
def fresh_answers():
    forget_answers()
    yield
    forget_answers()


@pytest.fixture
def gpu(monkeypatch):
    """Answer as on an H200 with triton and torch's flash attention, without them."""
    pretend_gpu(monkeypatch)
    pretend_installed(monkeypatch, "triton")
    monkeypatch.setattr(fa4, "_is_distributed", lambda name: False)


def test_the_cpu_has_the_reference_and_reasons_for_the_rest():
    reports = {r.name: r for r in ops.explain_backends(device="cpu")}
    assert list(reports) == ["fa3", "fa4", "fa2", "flashinfer_cudnn", "torch", "triton", "reference"]
    assert reports["reference"].usable
    assert reports["reference"].reason == "usable"
    for name in ("fa3", "fa4", "fa2", "flashinfer_cudnn", "torch"):
        assert not reports[name].usable
        assert "needs an NVIDIA GPU, and the tensors are on cpu" in reports[name].reason
    assert not reports["triton"].usable
    assert "needs a GPU" in reports["triton"].reason
    assert ops.select_backend(device="cpu") == "reference"
    assert ops.select_backend(device="cpu", backend="reference") == "reference"


def chosen(traits, longest):
    return order.rank(traits, 16384, max(1, 16384 // longest), longest)[0].name


def test_the_choice_follows_dtype_and_width(gpu):
    assert chosen(GPU, 64) == "triton"
    assert chosen(GPU, 4096) in ("fa2", "torch", "triton")  # flash-attn isn't installed here
    single = Traits(GPU.device, torch.float32, 80, 80, 16, 16)
    assert chosen(single, 4096) == "triton"
    double = Traits(GPU.device, torch.float64, 80, 80, 16, 16)
    assert chosen(double, 4096) == "reference"
    wide = Traits(GPU.device, torch.bfloat16, 320, 80, 16, 16)
    assert chosen(wide, 4096) == "reference"


def test_architectures_that_were_not_measured_have_an_order(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert chosen(GPU, 4096) == "fa2"
    assert chosen(GPU, 64) == "triton"


def test_old_gpus_have_the_reference(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert list(registry.usable_backends(GPU)) == ["reference"]
    assert "8.0" in {r.name: r for r in registry.reports(GPU)}["fa2"].reason


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("fa3", "fa3_fwd_interface"),
        ("fa3", "flash_attn_interface"),
        ("fa4", "flash_attn.cute"),
        ("fa2", "flash_attn.flash_attn_interface"),
        ("flashinfer_cudnn", "cudnn"),
        ("triton", "triton"),
    ],
)
def test_a_broken_package_is_an_error_everywhere_but_in_the_account(gpu, monkeypatch, name, module):
    pretend_installed(monkeypatch, "triton", module)
    monkeypatch.setattr(fa4, "_is_distributed", lambda name: True)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)  # its import fails
    with pytest.raises(ops.BrokenBackend, match=f"{module} is installed but can't be imported"):
        ops.select_backend(device="cuda:0", head_dim=80, heads=16)
    with pytest.raises(ops.BrokenBackend, match="reinstall it"):
        registry.require_backend(name, GPU)
    reports = {r.name: r for r in registry.reports(GPU)}
    assert not reports[name].usable
    assert reports[name].reason.startswith(f"broken: {module}")
    if module != "triton":
        assert reports["triton"].usable
    else:
        assert sum(r.usable for r in reports.values()) == 1  # the reference
    # The CPU doesn't need the package, and goes on working.
    assert ops.select_backend(device="cpu") == "reference"


def test_without_flash_attn_and_torchs_copy_there_is_a_reason(gpu, monkeypatch):
    assert fa2.source() == "torch"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "isn't installed" in {r.name: r for r in registry.reports(GPU)}["fa2"].reason


def test_without_triton_only_the_reference_is_left(gpu, monkeypatch):
    pretend_installed(monkeypatch, "cudnn")
    monkeypatch.setattr(fa3, "_build", lambda: fa3._Build("any", torch.add, (), (), {}))
    monkeypatch.setattr(fa4, "_package", lambda: torch.add)
    assert list(registry.usable_backends(GPU)) == ["reference"]
    for report in registry.reports(GPU)[:-1]:
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
        ops.GradientError,
        match=r"'extra' has no gradient.*name one that has: "
        r"fa3, fa4, fa2, flashinfer_cudnn, torch, triton, reference",
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
    padded = padded_power(width)
    assert padded >= max(16, width)
    assert padded & (padded - 1) == 0
    assert padded == 16 or padded < 2 * width


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_blocks_fit_in_shared_memory(item_size, shared):
    for width in (16, 64, 80, 96, 128, 256):
        blocks = block_table(item_size, width, shared)
        padded = padded_power(width)
        held = padded * item_size * (blocks.queries + 2 * blocks.stages * blocks.keys)
        assert held <= shared, (width, blocks)
