"""Methods of a model that encode images or clips of one size, replaced: the same call, the same record."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import CapturedEncoder
from mmgraph.integrations.transformers.attention import TowerAttention
from mmgraph.integrations.transformers.fixed_families import FixedParts, Unserved, fixed_parts_of
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.integrations.transformers.sites import Options, served
from mmgraph.towers.fixed import FixedEncoder, FixedInput, FixedItem, stacked

__all__ = ["FixedRunner", "FixedSite"]

logger = logging.getLogger(__name__)

_NOTHING: frozenset[str] = frozenset()


class FixedRunner:
    """Runs batches of fixed-size items through a function: from graphs, or as it is.

    Args:
        name: The tower's dotted name, for buckets and reports.
        tower: The tower, whose attention becomes mmgraph's while the function runs.
        modules: All that the function runs.
        run: The function, as `FixedEncoder` takes it.
        inputs: What it takes.
        outputs: What it gives.
        unit: What an item is called.
        options: What was asked for.
    """

    def __init__(
        self,
        name: str,
        tower: Any,
        modules: Sequence[Any],
        run: Callable[..., Mapping[str, Tensor]],
        inputs: Mapping[str, FixedInput],
        outputs: Sequence[str],
        unit: str,
        options: Options,
    ) -> None:
        self.name, self.modules, self.options, self.outputs = name, tuple(modules), options, tuple(outputs)
        self.attention = TowerAttention(tower, options.backend)
        self.encoder: CapturedEncoder | None = None
        self._inputs = dict(inputs)
        self._told: set[str] = set()
        device = next(tower.parameters()).device

        def attended(**batch: Tensor) -> Mapping[str, Tensor]:
            with self.attention.ours():
                return run(**batch)

        self.adapter = FixedEncoder(attended, inputs, outputs, device=device, unit=unit)

    def capture(self) -> None:
        """Captures, where that was asked for.

        Raises:
            CaptureFailedError: It can't be captured.
        """
        if not self.options.captures(self.adapter.device):
            return
        grid = self.options.grid(self.name, self.adapter.grid(self.options.max_images))
        self.encoder = CapturedEncoder(
            self.adapter, buckets=grid, watch=list(self.modules), **self.options.manager
        )
        try:
            self.encoder.precompile([self.adapter.example()], progress=self.options.progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drops the graphs."""
        if self.encoder is not None:
            self.encoder.close()
            self.encoder = None

    def __call__(self, items: Sequence[FixedItem]) -> dict[str, Tensor]:
        """The outputs by name, ``[items, ...]``.

        Raises:
            Unserved: No items, or items of another size.
        """
        if not items:
            raise Unserved("there is nothing to encode")
        for name, declared in self._inputs.items():
            other = next((i for i in items if tuple(i.values[name].shape) != declared.shape), None)
            if other is not None:
                raise Unserved(
                    f"{name} of an item are {list(other.values[name].shape)}; those of {list(declared.shape)} are fast"
                )
            if torch.is_grad_enabled() and any(item.values[name].requires_grad for item in items):
                raise Unserved(f"{name} need gradients")
        with torch.no_grad():
            if self.encoder is not None:
                found = self.encoder(items)
            else:
                found = self.adapter.split(self.adapter.forward(**self.adapter.prepare(items, None)), items)
            return {name: stacked([one[name] for one in found]) for name in self.outputs}

    def unserved(self) -> str | None:
        """Why nothing can be served now, or None."""
        for module in self.modules:
            reason = served(module, {}, _NOTHING)
            config = getattr(module, "config", None)
            for asked in ("output_hidden_states", "output_attentions"):
                if reason is None and getattr(config, asked, False):
                    reason = f"its configuration asks for {asked}"
            if reason is not None:
                return reason
        return None

    def as_it_was(self, reason: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs transformers' own, and says why, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s runs as transformers has it: %s", self.name, reason)
        with self.attention.as_before():
            return original(*args, **kwargs)


class FixedSite:
    """Replaces the methods of a model that give image or audio features.

    Args:
        name: The model's dotted name.
        model: The model with the methods, such as ``LlavaModel``.
        options: What was asked for.

    Raises:
        UnsupportedModelError: The model isn't built as known.
    """

    def __init__(self, name: str, model: Any, options: Options) -> None:
        self.family, self.model = type(model).__name__, model
        self.parts: FixedParts = fixed_parts_of(model)
        self.name = f"{name}.{self.parts.tower_name}" if name else self.parts.tower_name
        parts = self.parts
        self.runner = FixedRunner(
            self.name,
            parts.tower,
            parts.modules,
            parts.run,
            parts.inputs,
            ("rows", "last"),
            parts.unit,
            options,
        )
        self._originals = {method: getattr(model, method) for method in parts.methods}

    @property
    def encoder(self) -> CapturedEncoder | None:
        """See `Site`."""
        return self.runner.encoder

    def install(self, patches: Patches) -> None:
        """See `Site`."""
        self.runner.capture()
        for method in self.parts.methods:
            patches.set(self.model, method, self._replaced(method))

    def close(self) -> None:
        """See `Site`."""
        self.runner.close()

    def _replaced(self, method: str) -> Callable[..., Any]:
        original = self._originals[method]
        signature = inspect.signature(original)
        answer = self.parts.methods[method]

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            try:
                given = _arguments(signature, args, kwargs)
                self._check(given)
                taken = {name: value for name, value in given.items() if name in self.parts.takes}
                return answer(self.runner, taken)
            except Unserved as reason:
                return self.runner.as_it_was(str(reason), original, *args, **kwargs)

        return replaced

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises `Unserved` for what was asked for and the captured function hasn't got."""
        config = self.model.config
        returns = given.get("return_dict")
        if returns is False or (returns is None and not getattr(config, "return_dict", True)):
            raise Unserved("a tuple was asked for")
        for name, value in self.parts.options.items():
            asked = given.get(name)
            if (getattr(config, name) if asked is None else asked) != value:
                raise Unserved(f"{name} is {asked!r}, and {value!r} was captured")
        for name, value in given.items():
            known = name in self.parts.takes or name in self.parts.options or name == "return_dict"
            if not known and value is not None and value is not False:
                raise Unserved(f"it was asked for {name}")
        reason = self.runner.unserved()
        if reason is not None:
            raise Unserved(reason)


def _arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        # transformers' own error is better than one from here.
        raise Unserved(f"its arguments are wrong: {error}") from error
    found = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found
