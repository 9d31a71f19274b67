"""Invariant: a checkpoint of an encoder's attention loads the same numbers from every usual form, or isn't loaded."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmgraph import MultimodalEncoderAttention
from mmgraph.encoder_checkpoints import adapt_checkpoint
from mmgraph.encoder_parallel import WeightShard
from mmgraph.errors import EncoderCheckpointError

FUSED = {"qkv": "qkv.{}", "in_proj": "in_proj_{}"}
SPLIT = {"q_proj": ("q_proj", "k_proj", "v_proj"), "q": ("q", "k", "v"), "query": ("query", "key", "value")}
OUT = ("proj", "out_proj", "o_proj", "projection_layer")


def make(seed=0, **options):
    torch.manual_seed(seed)
    return MultimodalEncoderAttention(24, 4, **{"num_kv_heads": 2, "head_size": 6} | options)


def checkpoint(module, form="qkv", out="proj", prefix=""):
    """A module's numbers under other names."""
    state = {}
    for kind in ("weight", "bias"):
        value = getattr(module.qkv, kind)
        if value is not None and form in FUSED:
            state[prefix + FUSED[form].format(kind)] = value.detach().clone()
        elif value is not None:
            parts = value.detach().split(module.heads.sections)
            state |= {
                f"{prefix}{name}.{kind}": part.clone() for name, part in zip(SPLIT[form], parts, strict=True)
            }
        if getattr(module.proj, kind) is not None:
            state[f"{prefix}{out}.{kind}"] = getattr(module.proj, kind).detach().clone()
    return state


def equal(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@settings(max_examples=60)
@given(
    form=st.sampled_from([*FUSED, *SPLIT]),
    out=st.sampled_from(OUT),
    nested=st.booleans(),
    assign=st.booleans(),
    biases=st.tuples(st.booleans(), st.booleans()),
)
def test_every_usual_form_loads(form, out, nested, assign, biases):
    options = {"qkv_bias": biases[0], "proj_bias": biases[1]}
    source, target = make(1, **options), make(2, **options)
    state = checkpoint(source, form, out, "block.0." if nested else "")
    before = dict(state)
    outer = nn.ModuleDict({"block": nn.ModuleList([target])}) if nested else target
    assert list(outer.load_state_dict(state, assign=assign)) == [[], []]
    assert equal(source, target)
    assert state == before


def test_what_pytorchs_own_attention_saved_loads_and_computes_the_same():
    theirs = nn.MultiheadAttention(24, 4, batch_first=True)
    ours = MultimodalEncoderAttention(24, 4)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("names", SPLIT.values())
def test_a_bias_that_k_alone_lacks_is_zero(names):
    source, target = make(1), make(2)
    with torch.no_grad():
        source.qkv.bias[24:36] = 0
    state = checkpoint(source, names[0])
    del state[f"{names[1]}.bias"]
    target.load_state_dict(state)
    assert equal(source, target)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_loads_too(copied):
    source, target = make(1), copied(make(2))
    target.load_state_dict(checkpoint(source, "q_proj", "out_proj"))
    assert equal(source, target)


def without(state, *keys):
    return {key: value for key, value in state.items() if key not in keys}


SOURCE = make(1)
CASES = {
    "two forms of qkv": (
        checkpoint(SOURCE) | checkpoint(SOURCE, "q_proj"),
        r"2 forms, qkv.weight, qkv.bias, and q_proj.weight, .*: keep one",
    ),
    "a weight and a bias of two forms": (
        without(checkpoint(SOURCE), "qkv.bias") | {"in_proj_bias": SOURCE.qkv.bias.detach()},
        "2 forms, qkv.weight, and in_proj_bias",
    ),
    "two forms of proj": (
        checkpoint(SOURCE) | {"o_proj.weight": SOURCE.proj.weight.detach()},
        "2 forms, proj.weight, proj.bias, and o_proj.weight",
    ),
    "no k": (
        without(checkpoint(SOURCE, "query"), "key.weight"),
        "has query.weight, value.weight but not key.weight",
    ),
    "no bias of v": (
        without(checkpoint(SOURCE, "q"), "v.bias"),
        "has q.bias, k.bias but not v.bias: load all of them at once",
    ),
    "another number of heads": (
        checkpoint(make(num_kv_heads=4)),
        r"qkv.weight must have the shape \[48, 24\], got \[72, 24\].*isn't the checkpoint's",
    ),
    "another width of v": (
        checkpoint(SOURCE, "q") | {"v.weight": torch.zeros(24, 24)},
        r"v.weight must have the shape \[12, 24\], got \[24, 24\]",
    ),
    "another width of the input": (
        {"out_proj.weight": torch.zeros(32, 24)},
        r"out_proj.weight must have the shape \[24, 24\], got \[32, 24\]",
    ),
    "a bias of another shape": ({"proj.bias": torch.zeros(1, 24)}, r"proj.bias must have the shape \[24\]"),
    "integers": (
        checkpoint(SOURCE) | {"qkv.weight": torch.zeros(48, 24, dtype=torch.int32)},
        r"quantised or adapted, by qkv.weight \(Tensor torch.int32\)",
    ),
    "eight bits": (
        checkpoint(SOURCE, out="o_proj") | {"o_proj.weight": torch.zeros(24, 24).to(torch.float8_e4m3fn)},
        r"by o_proj.weight \(Tensor torch.float8_e4m3fn\)",
    ),
    "a scale beside it": (checkpoint(SOURCE) | {"qkv.weight_scale": torch.ones(48)}, "by qkv.weight_scale"),
    "nothing but packed numbers": ({"k_proj.qweight": torch.zeros(1)}, "by k_proj.qweight"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_refused_and_changes_nothing(case, strict):
    state, words = CASES[case]
    target, untouched, before = make(2), make(2), dict(state)
    with pytest.raises(EncoderCheckpointError, match=words):
        target.load_state_dict(state, strict=strict)
    assert equal(target, untouched)
    assert state == before
    target.load_state_dict(checkpoint(SOURCE))
    assert equal(target, SOURCE)


def test_keys_that_are_missing_or_too_many_are_pytorchs_errors():
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "qkv.bias"'):
        make().load_state_dict(without(checkpoint(SOURCE), "qkv.bias"))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "qkv.bias"'):
        make(qkv_bias=False).load_state_dict(checkpoint(SOURCE, "q"))
    found = make().load_state_dict(checkpoint(SOURCE) | {"norm.weight": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["norm.weight"]


class Quantised(nn.Linear):
    """Stands for a projection that another library put there."""

    def __init__(self):
        super().__init__(24, 48)
        self.register_buffer("weight_scale", torch.zeros(48))


def test_a_replaced_projection_loads_its_own_names_and_refuses_others():
    target = make(2)
    target.qkv = Quantised()
    own = checkpoint(SOURCE) | {"qkv.weight_scale": torch.full((48,), 3.0)}
    target.load_state_dict(own)
    assert torch.equal(target.qkv.weight, SOURCE.qkv.weight)
    assert target.qkv.weight_scale[0].item() == 3
    with pytest.raises(EncoderCheckpointError, match=r"q_proj.weight.* form of qkv.*Quantised.*quantise then"):
        target.load_state_dict(checkpoint(SOURCE, "q_proj"))


@settings(max_examples=40)
@given(
    form=st.sampled_from([*FUSED, *SPLIT]),
    out=st.sampled_from(OUT),
    ranks=st.sampled_from([2, 4]),
    proj_bias=st.booleans(),
)
def test_each_rank_takes_its_heads_of_a_whole_checkpoint(form, out, ranks, proj_bias):
    """What is saved by a rank loads there again; the parts of all ranks are the whole."""
    whole = make(1, num_kv_heads=4, proj_bias=proj_bias)
    q, k, v = whole.qkv.weight.detach().split(24)
    rows = 24 // ranks
    for rank in range(ranks):
        rank_module = copy.copy(whole)
        rank_module.shard = WeightShard(rank, ranks, "tp")
        state = checkpoint(whole, form, out)
        adapt_checkpoint(rank_module, state, "")
        part = slice(rank * rows, (rank + 1) * rows)
        assert torch.equal(state["qkv.weight"], torch.cat([q[part], k[part], v[part]]))
        assert torch.equal(state["qkv.bias"].view(3, rows), whole.qkv.bias.view(3, ranks, rows)[:, rank])
        assert torch.equal(state["proj.weight"], whole.proj.weight[:, part])
        assert state["proj.weight"].is_contiguous()
        assert ("proj_bias" in state) == proj_bias
        assert state.keys() <= {"qkv.weight", "qkv.bias", "proj.weight", "proj_bias"}
        saved = dict(state)
        adapt_checkpoint(rank_module, state, "")
        assert all(state[key] is saved[key] for key in saved)
        assert len(state) == len(saved)
        with pytest.raises(
            EncoderCheckpointError, match=rf"\[72, 24\] or, this rank's part, \[{3 * rows}, 24\]"
        ):
            adapt_checkpoint(rank_module, {"qkv.weight": torch.zeros(60, 24)}, "")
        if proj_bias:
            twice = {"proj.bias": whole.proj.bias, "proj_bias": whole.proj.bias}
            with pytest.raises(EncoderCheckpointError, match="the output's bias twice"):
                adapt_checkpoint(rank_module, twice, "")
