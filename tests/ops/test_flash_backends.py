"""Invariant: each of NVIDIA's attention backends is usable where its kernels are, and says elsewhere what it lacks."""

from types import SimpleNamespace

import pytest
import torch
from pretended import packages_in, pretend_gpu, pretend_installed

from mmgraph import ops
from mmgraph.ops.attention import fa2, fa3, fa4, registry
from mmgraph.ops.attention.registry import Traits

GPU = torch.device("cuda", 0)
FA3_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, "
    "int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int num_splits=0) -> (Tensor, Tensor)"
)
FA2 = """
class flash_attn_gpu:
    @staticmethod
    def varlen_fwd(*arguments): ...
"""
FA4 = """
def _flash_attn_fwd(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, return_lse=False,
): ...
"""
CUDNN = """
from types import SimpleNamespace
_pybind_module = SimpleNamespace(backend_graph=SimpleNamespace(_execute_with_raw_ptrs=None))
def backend_version():
    return 91900
"""


def traits(device=GPU, dtype=torch.bfloat16, width=80, v_width=None):
    return Traits(device, dtype, width, v_width or width, 16, 16)


def reasons(of):
    return {report.name: report.reason for report in registry.reports(of)}


def usable(of):
    registry.forget_choices()
    return set(registry.usable_backends(of))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pretend_gpu(monkeypatch)
    with packages_in(tmp_path, monkeypatch) as made:
        yield made


def add_fa2(folder):
    folder.write("flash_attn/__init__.py")
    folder.write("flash_attn/flash_attn_interface.py", FA2)
    folder.distribution("flash-attn", "2.8.3")


def add_fa4(folder, name="flash-attn-4"):
    folder.write("flash_attn/cute/__init__.py")
    folder.write("flash_attn/cute/interface.py", FA4)
    folder.distribution(name, "4.0.0b22")


def add_fa3(folder, monkeypatch, name="fa3_fwd", schema=FA3_SCHEMA, with_table=True, **left_out):
    """The fa3-fwd package, or FlashAttention's own; what the build leaves out."""
    module, config = ("fa3_fwd_interface", "fa3_fwd_config")
    if name != "fa3_fwd":
        module, config = ("flash_attn_interface", "flash_attn_config")
    folder.write(f"{module}.py")
    flags = {f"FLASHATTENTION_DISABLE_{flag}": value for flag, value in left_out.items()}
    if with_table:
        folder.write(f"{config}.py", f"CONFIG = {{'build_flags': {flags}}}\n")
    op = SimpleNamespace(_schema=torch._C.parse_schema(schema))
    monkeypatch.setattr(torch.ops, name, SimpleNamespace(fwd=SimpleNamespace(default=op)), raising=False)
    folder.forget()
    return op


@pytest.fixture
def full(folder, monkeypatch):
    """A machine with every package."""
    add_fa2(folder)
    add_fa4(folder)
    add_fa3(folder, monkeypatch)
    folder.write("cudnn/__init__.py", CUDNN)
    return folder


ANY_NVIDIA = {"fa2", "flashinfer_cudnn", "torch", "triton", "reference"}


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((9, 0), ANY_NVIDIA | {"fa3", "fa4"}),  # H200
        ((10, 0), ANY_NVIDIA | {"fa4"}),  # Blackwell
        ((11, 0), ANY_NVIDIA | {"fa4"}),
        ((12, 0), ANY_NVIDIA),
        ((8, 0), ANY_NVIDIA),  # Ampere
        ((8, 9), ANY_NVIDIA),
        ((7, 5), {"reference"}),
    ],
)
def test_each_architecture_has_its_backends(full, monkeypatch, capability, names):
    pretend_gpu(monkeypatch, capability)
    assert usable(traits()) == names
    given = reasons(traits())
    version = f"{capability[0]}.{capability[1]}"
    if "fa3" not in names:
        assert given["fa3"] == f"it needs compute capability 9.x, and cuda:0 has {version}"
    if "fa4" not in names:
        wanted = "9.x or 10.x or 11.x"
        assert given["fa4"] == f"it needs compute capability {wanted}, and cuda:0 has {version}"
    if "fa2" not in names:
        for name in ("fa2", "torch", "flashinfer_cudnn", "triton"):
            assert given[name] == "it needs compute capability 8.0 or more"


def test_gpus_of_another_maker_have_triton(full, monkeypatch):
    pretend_gpu(monkeypatch, (9, 4), hip="6.4")
    assert usable(traits()) == {"triton", "reference"}
    for name in ("fa3", "fa4", "fa2", "torch", "flashinfer_cudnn"):
        assert "needs an NVIDIA GPU, and the tensors are on a GPU of another maker" in reasons(traits())[name]


def test_a_cpu_has_the_reference(full):
    cpu = traits(torch.device("cpu"))
    assert usable(cpu) == {"reference"}
    for name in ("fa3", "fa4", "fa2", "torch", "flashinfer_cudnn"):
        assert "needs an NVIDIA GPU, and the tensors are on cpu" in reasons(cpu)[name]


def test_nothing_is_imported_for_devices_that_have_no_use_for_it(folder):
    for path in ("fa3_fwd_interface.py", "flash_attn/__init__.py", "flash_attn/cute/__init__.py", "cudnn.py"):
        folder.write(path, "raise RuntimeError('imported')\n")
    folder.distribution("flash-attn-4", "4.0.0")
    assert usable(traits(torch.device("cpu"))) == {"reference"}
    assert usable(traits(dtype=torch.float32)) == {"triton", "reference"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_have_a_reason(full, dtype):
    for name in ("fa3", "fa4", "fa2", "torch", "flashinfer_cudnn"):
        assert reasons(traits(dtype=dtype))[name] == f"it takes bfloat16 and float16, not {dtype}"


def test_wide_heads_have_a_reason(full, monkeypatch):
    for name in ("fa3", "fa4", "fa2", "torch"):
        assert reasons(traits(width=256))[name] == "usable"
        assert reasons(traits(width=8, v_width=257))[name] == "it takes widths up to 256, not 257"
    pretend_gpu(monkeypatch, (10, 0))
    for width in (8, 72, 128, 249, 256):
        assert reasons(traits(width=width))["fa4"] == "usable"
    for width, padded in ((129, 136), (192, 192), (248, 248)):
        assert f"widths up to 128, and 256, not {padded}" in reasons(traits(width=width))["fa4"]
        assert reasons(traits(width=width))["fa2"] == "usable"


def test_missing_packages_have_a_reason(folder, monkeypatch):
    pretend_installed(monkeypatch, "triton")
    given = reasons(traits())
    assert given["fa3"] == "no FlashAttention 3 is installed (fa3-fwd, flash_attn_interface or tokenspeed-fa3)"
    assert given["fa4"] == "flash-attn-4 (flash_attn.cute) isn't installed"
    assert given["flashinfer_cudnn"] == "nvidia-cudnn-frontend isn't installed"
    assert usable(traits()) == {"fa2", "torch", "triton", "reference"}
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    given = reasons(traits())
    assert given["fa2"] == "flash-attn isn't installed and this PyTorch was built without its own copy"
    assert given["torch"] == "this PyTorch was built without FlashAttention"
    assert usable(traits()) == {"triton", "reference"}


def test_flash_attn_needs_no_copy_in_torch(full, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert reasons(traits())["fa2"] == "usable"
    assert fa2.source() == "flash-attn"


@pytest.mark.parametrize("name", ["fa3_fwd", "flash_attn_3"])
def test_fa3_says_what_its_build_leaves_out(folder, monkeypatch, name):
    module = "fa3_fwd_interface" if name == "fa3_fwd" else "flash_attn_interface"

    def why_not(dtype=torch.bfloat16, width=80, **left_out):
        add_fa3(folder, monkeypatch, name, **left_out)
        return fa3._why_not(traits(dtype=dtype, width=width))

    assert why_not() is None
    assert why_not(torch.float16) is None
    assert why_not(torch.float16, FP16=True) == f"the installed build ({module}) has no float16 kernels"
    assert why_not(torch.bfloat16, FP16=True) is None
    assert why_not(torch.float16, FP16=False) is None
    assert why_not(VARLEN=True) == (
        f"the installed build ({module}) has no kernels for sequences of varying lengths"
    )
    for width, flag in ((200, "HDIM256"), (256, "HDIM256")):
        assert why_not(width=width, **{flag: True}) == (
            f"the installed build ({module}) has no kernels for width {width}"
        )
    # A narrower head runs in the next wider kernel that was built.
    assert why_not(width=60, HDIM64=True) is None
    assert why_not(width=120, HDIM128=True, HDIM192=True) is None
    assert "for width 120" in why_not(width=117, HDIM128=True, HDIM192=True, HDIM256=True)
    assert why_not(width=96, HDIM128=True, HDIM192=True, HDIM256=True) is None


def test_whichever_fa3_is_installed_is_taken(folder, monkeypatch):
    own = add_fa3(folder, monkeypatch, "flash_attn_3")
    assert fa3._build().op is own
    assert fa3._build().name == "flash_attn_interface"
    forward_only = add_fa3(folder, monkeypatch, "fa3_fwd")
    assert fa3._build().op is forward_only
    assert fa3._build().name == "fa3_fwd_interface"


def test_an_fa3_without_an_argument_is_broken(folder, monkeypatch):
    add_fa3(folder, monkeypatch, schema=FA3_SCHEMA.replace(", int num_splits=0", ""))
    with pytest.raises(
        ops.BrokenBackend, match="its kernel takes no num_splits; it takes q, k, v, cu_seqlens_q"
    ):
        fa3._build()
    assert reasons(traits())["fa3"].startswith("broken: fa3_fwd_interface")


def test_flash_attns_early_state_of_fa4_isnt_fa4(folder, monkeypatch):
    add_fa2(folder)
    folder.write("flash_attn/cute/__init__.py", "raise RuntimeError('imported')\n")
    assert fa4._package() is None
    assert reasons(traits())["fa4"] == "flash-attn-4 (flash_attn.cute) isn't installed"
    assert fa2.source() == "flash-attn"
    assert reasons(traits())["fa2"] == "usable"


@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn-cute"])
def test_fa4_alone_leaves_fa2_to_torch(folder, name):
    add_fa4(folder, name)
    assert fa4._package().__name__ == "_flash_attn_fwd"
    assert reasons(traits())["fa4"] == "usable"
    assert fa2._package() is None
    assert fa2.source() == "torch"
    assert reasons(traits())["fa2"] == "usable"


def test_both_may_be_installed(folder):
    add_fa2(folder)
    add_fa4(folder)
    assert fa4._package().__name__ == "_flash_attn_fwd"
    assert fa2.source() == "flash-attn"


def test_fa4_by_name_without_its_folder_isnt_installed(folder):
    add_fa2(folder)
    folder.distribution("flash-attn-4", "4.0.0")
    assert fa4._package() is None


def test_a_broken_fa4_leaves_fa2_alone(folder):
    add_fa2(folder)
    add_fa4(folder)
    folder.write("flash_attn/cute/interface.py", FA4.replace("return_lse=False,", ""))
    with pytest.raises(ops.BrokenBackend, match="its forward function takes no return_lse"):
        fa4._package()
    assert reasons(traits())["fa4"].startswith("broken: flash_attn.cute")
    assert reasons(traits())["fa2"] == "usable"


def test_a_broken_flash_attn_is_no_quiet_step_to_torchs_copy(folder):
    add_fa2(folder)
    folder.write("flash_attn/flash_attn_interface.py", "raise OSError('undefined symbol')\n")
    with pytest.raises(ops.BrokenBackend, match=r"flash_attn\.flash_attn_interface.*undefined symbol"):
        fa2.source()
    assert reasons(traits())["torch"] == "usable"


@pytest.mark.parametrize("name", ["fa3_fwd", "flash_attn_3"])
def test_a_build_without_a_table_of_what_it_leaves_out_is_taken_as_whole(folder, monkeypatch, name):
    add_fa3(folder, monkeypatch, name, with_table=False)
    for dtype in (torch.bfloat16, torch.float16):
        assert "fa3" in usable(traits(dtype=dtype))
