"""Checkpoints of encoder attentions under the usual names, as the names and parts that a module has.

A ``load_state_dict`` pre-hook: whole projections of q, k and v become one, other names become ``qkv`` and ``proj``, and
where weights are split over ranks, whole ones become this rank's. Nothing is changed before everything was checked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mmgraph.encoder_parallel import HeadCounts, WeightShard
from mmgraph.errors import EncoderCheckpointError

Tensor = torch.Tensor

_KINDS = ("weight", "bias")
_FUSED = {"qkv": "qkv.", "in_proj": "in_proj_"}
_SPLIT = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
_OUT = ("proj", "out_proj", "o_proj", "projection_layer")
_QKV_MODULES = ("qkv", *(name for names in _SPLIT for name in names))


class Projections(Protocol):
    """What the hook needs of the module."""

    qkv: nn.Module
    proj: nn.Module
    embed_dim: int
    heads: HeadCounts
    shard: WeightShard


class _Edit(NamedTuple):
    """Keys that go, and tensors that come in their place."""

    gone: list[str]
    new: dict[str, Tensor]


def adapt_checkpoint(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """The pre-hook: bring a checkpoint's keys below ``prefix`` into the module's form.

    Raises:
        EncoderCheckpointError: Sizes don't fit, there are two forms of a projection or a part of one, or the checkpoint
            is quantised and the module isn't.
    """
    edits = [*_qkv_edits(module, state_dict, prefix), *_proj_edits(module, state_dict, prefix)]
    for edit in edits:
        for key in edit.gone:
            del state_dict[key]
    for edit in edits:
        state_dict.update(edit.new)


def _qkv_edits(module: Projections, state: Mapping[str, Any], prefix: str) -> list[_Edit]:
    forms: dict[tuple[str, ...], list[str]] = {}
    for name, start in _FUSED.items():
        forms[(name,)] = _present(state, [f"{prefix}{start}{kind}" for kind in _KINDS])
    for names in _SPLIT:
        forms[names] = _present(state, [f"{prefix}{name}.{kind}" for name in names for kind in _KINDS])
    form = _only_form(forms)
    if _is_plain(module.qkv):
        _refuse_quantised(state, prefix, _QKV_MODULES, forms)
    if form is None:
        return []
    if not _is_plain(module.qkv):
        return _refuse_other_names("qkv", module.qkv, form == ("qkv",), forms[form])
    edits = []
    for kind in _KINDS:
        if len(form) == 1:
            edits += _fused_edit(module, state, f"{prefix}{_FUSED[form[0]]}{kind}", f"{prefix}qkv.{kind}")
        else:
            keys = [f"{prefix}{name}.{kind}" for name in form]
            edits += _split_edit(module, state, keys, f"{prefix}qkv.{kind}")
    return edits


def _fused_edit(module: Projections, state: Mapping[str, Any], key: str, target: str) -> list[_Edit]:
    if key not in state:
        return []
    value = state[key]
    tail = [module.embed_dim] if target.endswith("weight") else []
    whole, own = (sum(counts.sections) for counts in (module.heads, module.shard.local(module.heads)))
    _check_shape(key, value, [[whole, *tail], [own, *tail]])
    if value.shape[0] != own:
        value = module.shard.qkv(value, module.heads)
    return [] if key == target and value is state[key] else [_Edit([key], {target: value})]


def _split_edit(module: Projections, state: Mapping[str, Any], keys: list[str], target: str) -> list[_Edit]:
    present = _present(state, keys)
    if not present:
        return []
    tail = [module.embed_dim] if target.endswith("weight") else []
    local = module.shard.local(module.heads).sections
    # Some models have no bias for k: with softmax it changes nothing there.
    without_k = target.endswith("bias") and present == [keys[0], keys[2]]
    if len(present) < 3 and not without_k:
        missing = [key for key in keys if key not in present]
        raise EncoderCheckpointError(
            f"the checkpoint has {_listed(present)} but not {_listed(missing)}: load all of them at once."
        )
    parts: list[Tensor] = []
    for key, whole, own in zip(keys, module.heads.sections, local, strict=True):
        if key not in state:
            parts.append(parts[0].new_zeros(own))
            continue
        _check_shape(key, state[key], [[whole, *tail], [own, *tail]])
        parts.append(state[key] if state[key].shape[0] == own else module.shard.rows_of(state[key], own))
    return [_Edit(present, {target: torch.cat(parts)})]


def _proj_edits(module: Projections, state: Mapping[str, Any], prefix: str) -> list[_Edit]:
    forms: dict[tuple[str, ...], list[str]] = {
        (name,): _present(state, [f"{prefix}{name}.{kind}" for kind in _KINDS]) for name in _OUT
    }
    form = _only_form(forms)
    if _is_plain(module.proj):
        _refuse_quantised(state, prefix, _OUT, forms)
    if form is None:
        return []
    name = form[0]
    if not _is_plain(module.proj):
        return _refuse_other_names("proj", module.proj, name == "proj", forms[form])
    edits = []
    weight, bias = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
    if weight in state:
        value = state[weight]
        whole, own = module.heads.sections[0], module.shard.local(module.heads).sections[0]
        _check_shape(weight, value, [[module.embed_dim, whole], [module.embed_dim, own]])
        if value.shape[1] != own:
            value = module.shard.columns(value, own)
        if name != "proj" or value is not state[weight]:
            edits.append(_Edit([weight], {f"{prefix}proj.weight": value}))
    if bias in state:
        _check_shape(bias, state[bias], [[module.embed_dim]])
        target = f"{prefix}proj.bias" if module.shard.size == 1 else f"{prefix}proj_bias"
        if bias != target:
            if target in state:
                raise EncoderCheckpointError(
                    f"the checkpoint has the output's bias twice, as {_listed([bias, target])}: keep one of them."
                )
            edits.append(_Edit([bias], {target: state[bias]}))
    return edits


def _present(state: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key in state]


def _only_form(forms: Mapping[tuple[str, ...], list[str]]) -> tuple[str, ...] | None:
    """The one form that the checkpoint has, or None if it has none."""
    found = [form for form, keys in forms.items() if keys]
    if len(found) > 1:
        keys = [_listed(forms[form]) for form in found]
        raise EncoderCheckpointError(
            f"the checkpoint has one projection in {len(found)} forms, {', and '.join(keys)}: keep one of them."
        )
    return found[0] if found else None


def _is_plain(linear: nn.Module) -> bool:
    """Whether a projection is as it was made, with a weight of numbers that can be cut and joined."""
    return type(linear) is nn.Linear and _is_plain_tensor(linear.weight)


def _is_plain_tensor(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.element_size() > 1  # float8 has a scale beside it
        and not hasattr(type(tensor), "__tensor_flatten__")  # a quantised or distributed subclass
    )


def _refuse_other_names(name: str, linear: nn.Module, own_names: bool, keys: list[str]) -> list[_Edit]:
    """Leave what a replaced projection loads to itself, and refuse what only a plain one could be given."""
    if own_names:
        return []
    raise EncoderCheckpointError(
        f"the checkpoint's {_listed(keys)} can't be brought into the form of {name}, which was quantised or replaced "
        f"({type(linear).__name__} with {type(getattr(linear, 'weight', None)).__name__}): load the checkpoint first, "
        "and quantise then."
    )


def _refuse_quantised(
    state: Mapping[str, Any],
    prefix: str,
    modules: Sequence[str],
    forms: Mapping[tuple[str, ...], list[str]],
) -> None:
    """Raise for weights that mean nothing without a scale, and for keys beside them that would be passed over."""
    odd = [key for keys in forms.values() for key in keys if not _is_plain_tensor(state[key])]
    beside = [
        key
        for key in state
        for name in modules
        if key.startswith(f"{prefix}{name}.") and key.removeprefix(f"{prefix}{name}.") not in _KINDS
    ]
    if odd or beside:
        kinds = [f"{key} ({type(state[key]).__name__} {getattr(state[key], 'dtype', '')})" for key in odd]
        raise EncoderCheckpointError(
            f"the checkpoint's projection is quantised or adapted, by {_listed([*kinds, *beside])}, and the module's "
            "isn't: quantise the module the same way before loading, or load a checkpoint of plain weights."
        )


def _check_shape(key: str, value: Any, shapes: list[list[int]]) -> None:
    if list(value.shape) not in shapes:
        choices = " or, this rank's part, ".join(str(shape) for shape in _unique(shapes))
        raise EncoderCheckpointError(
            f"{key} must have the shape {choices}, got {list(value.shape)}: embed_dim, num_heads, num_kv_heads or "
            "head_size isn't the checkpoint's."
        )


def _unique(shapes: list[list[int]]) -> list[list[int]]:
    return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
