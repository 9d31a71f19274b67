"""The merge of features into text embeddings, in the place of transformers' ``masked_scatter`` and its checks.

transformers compares counts on the host, which waits for the device, and scatters over a mask as large as the
embeddings. Here the mask stays ``[batch, length]``, the merge is one launch, and a wrong count is recorded on the
device for `mmgraph.ops.check_errors`; on a CPU it is an error at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from mmgraph.integrations.transformers.patches import Patches
from mmgraph.ops import deepstack_add, merge_embeddings

__all__ = ["install_merge", "merges"]

_LANGUAGE_MODELS = ("language_model", "text_model")
#: Models without a method of their own for it.
_MERGES_IN_FORWARD = frozenset({"Qwen2AudioModel"})
#: Models whose method takes rows by boolean indices, rather than by ``masked_scatter``.
_ROWWISE_MERGERS = frozenset({"SmolVLMModel"})


class _Merging(TorchFunctionMode):
    """Within it, ``embeds.masked_scatter(mask, features)`` over whole rows is `merge_embeddings`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.masked_scatter and len(args) == 3 and _whole_rows(*args):
            embeds, mask, features = args
            width = embeds.shape[-1]
            merged = merge_embeddings(
                embeds.reshape(-1, width),
                mask[..., 0].reshape(-1),
                features.reshape(-1, width).to(embeds.device),
            )
            return merged.view(embeds.shape)
        return func(*args, **(kwargs or {}))


def _whole_rows(embeds: Any, mask: Any, features: Any) -> bool:
    """Whether a mask takes or leaves whole rows, which its layout shows: one value for each row."""
    if not all(isinstance(one, Tensor) for one in (embeds, mask, features)) or embeds.ndim < 2:
        return False
    if mask.dtype != torch.bool or mask.shape[:-1] != embeds.shape[:-1] or features.numel() % embeds.shape[-1]:
        return False
    one_value = mask.shape[-1] == 1 or (mask.shape == embeds.shape and mask.stride(-1) == 0)
    return bool(one_value and embeds.is_floating_point() and features.is_floating_point())


def install_merge(inner: Any, patches: Patches) -> None:
    """Replaces the merge of a model.

    Args:
        inner: transformers' multimodal model: has ``forward``, and a language model.
        patches: Takes note, so that it can be undone.
    """
    language = _language_model(inner)
    forward, language_forward = inner.forward, language.forward

    def merging(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with _Merging():
            return forward(*args, **kwargs)

    def unmerged(*args: Any, **kwargs: Any) -> Any:
        # The language model runs outside: each of its thousands of calls would pass through the mode.
        if _merging_now():
            with _pop_mode_temporarily():
                return language_forward(*args, **kwargs)
        return language_forward(*args, **kwargs)

    patches.replace(inner, "forward", merging)
    patches.replace(language, "forward", unmerged)
    if callable(getattr(language, "_deepstack_process", None)):
        patches.replace(language, "_deepstack_process", _deepstack)
    if callable(getattr(inner, "get_placeholder_mask", None)):
        patches.replace(inner, "get_placeholder_mask", _mask_without_wait(inner, inner.get_placeholder_mask))
    if type(inner).__name__ in _ROWWISE_MERGERS:
        patches.replace(inner, "inputs_merger", _rows_merger(inner, inner.inputs_merger))


def merges(module: Any) -> bool:
    """Whether a module is a model that merges features into text in a way that is known."""
    name = type(module).__name__
    known = any(callable(getattr(module, method, None)) for method in ("get_placeholder_mask", "inputs_merger"))
    return (known or name in _MERGES_IN_FORWARD) and any(
        isinstance(getattr(module, part, None), torch.nn.Module) for part in _LANGUAGE_MODELS
    )


def _language_model(inner: Any) -> Any:
    for name in _LANGUAGE_MODELS:
        found = getattr(inner, name, None)
        if isinstance(found, torch.nn.Module):
            return found
    raise AttributeError(f"{type(inner).__name__} has no language_model or text_model")


def _merging_now() -> bool:
    from torch.overrides import _get_current_function_mode

    return isinstance(_get_current_function_mode(), _Merging)


def _mask_without_wait(inner: Any, masks: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' masks, without its comparison of counts, which waits for the device: the merge compares them."""
    parameters = list(inspect.signature(masks).parameters.values())
    kinds = {p.name: p.default for p in parameters if p.name.endswith("_features")}
    optional = all(default is None for default in kinds.values())
    token = f"{next(iter(kinds), 'image_features').removesuffix('_features')}_token_id"

    def get_placeholder_mask(input_ids: Any, inputs_embeds: Any = None, *features: Any, **named: Any) -> Any:
        given = [one for one in (*features, *named.values()) if isinstance(one, Tensor)]
        on_device = all(one.device.type != "cpu" for one in given)
        if on_device and input_ids is not None and inputs_embeds is not None:
            if optional:  # it compares what it is given
                return masks(input_ids, inputs_embeds)
            if len(kinds) == 1 and hasattr(inner.config, token):
                mask = input_ids == getattr(inner.config, token)
                return mask.unsqueeze(-1).to(inputs_embeds.device)
        return masks(input_ids, inputs_embeds, *features, **named)

    return get_placeholder_mask


def _rows_merger(inner: Any, merger: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the rows of all images at the placeholders, in order, which boolean indices wait for the device to do."""

    def inputs_merger(input_ids: Any, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Any:
        if input_ids is None or torch.compiler.is_compiling():
            return merger(input_ids, inputs_embeds, image_hidden_states)
        width = inputs_embeds.shape[-1]
        mask = (input_ids == inner.config.image_token_id).to(inputs_embeds.device)
        rows = image_hidden_states.to(inputs_embeds.device).reshape(-1, width)
        return merge_embeddings(inputs_embeds.reshape(-1, width), mask.reshape(-1), rows).view(
            inputs_embeds.shape
        )

    return inputs_merger


def _deepstack(hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Adds one level's rows at the masked positions; nothing waits for the device."""
    mask = visual_pos_masks.to(hidden_states.device).reshape(-1)
    numbers = mask.cumsum(0, dtype=torch.int32) - 1
    row_map = torch.where(mask, numbers, -1).to(torch.int32)
    width = hidden_states.shape[-1]
    rows = visual_embeds.to(hidden_states.device, hidden_states.dtype)
    return deepstack_add(hidden_states.reshape(-1, width), rows, row_map, 0).view(hidden_states.shape)
