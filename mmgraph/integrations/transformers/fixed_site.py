"""Methods of a model that encode images or clips of one size, replaced: the same call, the same record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmgraph.capture import CapturedEncoder
from mmgraph.integrations.transformers.fixed_families import fixed_parts_of
from mmgraph.integrations.transformers.fixed_parts import FixedParts
from mmgraph.integrations.transformers.patches import Patches
from mmgraph.integrations.transformers.runners import TowerRunner, Unserved
from mmgraph.integrations.transformers.sites import Options
from mmgraph.integrations.transformers.unchanged import Unchanged
from mmgraph.towers.fixed import FixedEncoder, FixedInput, FixedItem, stacked

__all__ = ["FixedRunner", "FixedSite", "arguments_of"]


class FixedRunner(TowerRunner):
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
        super().__init__(name, tower, modules, options)
        self._inputs, self._outputs = dict(inputs), tuple(outputs)

        def attended(**batch: Tensor) -> Mapping[str, Tensor]:
            with self.attention.ours():
                return run(**batch)

        device = next(tower.parameters()).device
        self.adapter = FixedEncoder(attended, inputs, outputs, device=device, unit=unit)

    def capture(self) -> None:
        """Captures, where that was asked for.

        Raises:
            CaptureFailedError: It can't be captured.
        """
        grid = self.adapter.grid(self.options.max_images)
        self.capture_with(self.adapter, grid, self.adapter.example(), self.adapter.device)

    def __call__(self, items: Sequence[FixedItem]) -> dict[str, Tensor]:
        """The outputs by name, ``[items, ...]``.

        Raises:
            Unserved: No items, items of another size, or a gradient is wanted.
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
        found = self.run(self.adapter, items)
        with torch.no_grad():
            return {name: stacked([one[name] for one in found]) for name in self._outputs}


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
        self.runner.unchanged = Unchanged(parts.modules, owner=model)
        self.encoder: CapturedEncoder | None = None
        self._originals = {method: getattr(model, method) for method in parts.methods}

    def install(self, patches: Patches) -> None:
        """See `Site`."""
        self.runner.capture()
        self.encoder = self.runner.encoder
        for method in self.parts.methods:
            patches.replace(self.model, method, self._replaced(method))

    def close(self) -> None:
        """See `Site`."""
        self.runner.close()
        self.encoder = None

    def _replaced(self, method: str) -> Callable[..., Any]:
        original = self._originals[method]
        signature = inspect.signature(original)
        answer = self.parts.methods[method]

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            try:
                given = arguments_of(signature, args, kwargs)
                self._check(given)
                taken = {name: value for name, value in given.items() if name in self.parts.takes}
                return answer(self.runner, taken)
            except Unserved as reason:
                why = str(reason)
            return self.runner.as_it_was(why, original, *args, **kwargs)

        return replaced

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises `Unserved` for what was asked for and the captured function hasn't got."""
        config = self.model.config
        for name, value in self.parts.options.items():
            asked = given.get(name)
            if (getattr(config, name) if asked is None else asked) != value:
                raise Unserved(f"{name} is {asked!r}, and {value!r} was captured")
        self.runner.check(given, config, self.parts.takes | self.parts.options.keys())


def arguments_of(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
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
