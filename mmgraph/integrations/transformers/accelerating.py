"""`accelerate`: finds what can be made faster in a transformers model, and makes it so; `restore` undoes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from mmgraph.capture import BucketGrid
from mmgraph.errors import OptionError, UnsupportedModelError
from mmgraph.integrations.transformers.audio_site import AudioSite
from mmgraph.integrations.transformers.fixed_families import FIXED_MODELS
from mmgraph.integrations.transformers.fixed_site import FixedSite
from mmgraph.integrations.transformers.kimi_site import KimiSite
from mmgraph.integrations.transformers.merging import install_merge, merges
from mmgraph.integrations.transformers.packed_families import PACKED_TOWERS
from mmgraph.integrations.transformers.packed_site import PackedSite
from mmgraph.integrations.transformers.patches import Patches, Replacement, refuse_copy
from mmgraph.integrations.transformers.sites import Options, Site
from mmgraph.towers.rewrites import Rewrites

__all__ = ["Acceleration", "accelerate", "restore"]

#: Where a model holds what was done to it, so that both go together.
_ATTRIBUTE = "_mmgraph_acceleration"


@dataclass(frozen=True, eq=False)
class Acceleration:
    """What was done to a model.

    Attributes:
        sites: What was replaced.
    """

    sites: tuple[Site, ...]
    _patches: Patches
    _model: weakref.ref[nn.Module]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refuse_copy("what was done")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy("what was done")

    def report(self) -> dict[str, Any]:
        """For each captured tower what its encoder reports: graphs, hits, padding, bytes."""
        return {site.name: site.encoder.report() for site in self.sites if site.encoder is not None}

    def fallbacks(self) -> dict[str, dict[str, int]]:
        """How often each encoder ran as transformers has it since, by reason. A server wants all of it empty."""
        counts: dict[str, Any] = {site.name: getattr(site, "runner", site) for site in self.sites}
        return {name: dict(owner.fallbacks) for name, owner in counts.items()}

    def __repr__(self) -> str:
        kinds = {False: "uncaptured", True: "captured"}
        sites = ", ".join(
            f"{site.name or site.family} ({kinds[site.encoder is not None]})" for site in self.sites
        )
        return f"Acceleration({sites})"

    def restore(self) -> None:
        """Undoes everything: the model runs as transformers has it, and its graphs' memory is given back.

        Called again it does nothing.
        """
        model = self._model()
        if model is not None and vars(model).get(_ATTRIBUTE) is self:
            del vars(model)[_ATTRIBUTE]
        self._patches.undo()
        for site in self.sites:
            site.close()


def accelerate(
    model: nn.Module,
    *,
    capture: bool | Literal["auto"] = "auto",
    buckets: BucketGrid | Mapping[str, BucketGrid] | None = None,
    max_tokens: int = 16384,
    max_images: int = 16,
    rewrites: Rewrites | None = None,
    backend: str | None = None,
    merge: bool = True,
    progress: bool = False,
    **manager: Any,
) -> Acceleration:
    """Makes the vision and audio encoders of a transformers model faster, with the same results.

    Encoders run through mmgraph's kernels and, on a GPU, from graphs; features are merged into the text in one launch.
    ``generate()`` and all else work as before. Calls that the fast way hasn't got (training, recorded gradients,
    attention weights, autocast) run as transformers runs them.

    Args:
        model: A model of transformers, such as ``Qwen3VLForConditionalGeneration``, in the dtype and on the device that
            it is going to serve with.
        capture: Whether encoders are captured: "auto" does on a GPU; True also records on a CPU, for tests.
        buckets: The buckets, for all encoders or by the encoder's dotted name; by default some that fit many uses.
        max_tokens: Patches of the largest bucket of a packed tower; more run eagerly.
        max_images: Images or clips of the largest bucket of other encoders.
        rewrites: Which rewrites run; by default all, which keep the numbers but for the order of sums.
        backend: The attention backend, or None for the fastest installed as measured.
        merge: Replace transformers' merge too.
        progress: Show a progress bar while graphs are captured.
        **manager: Options of `mmgraph.capture.CaptureManager`, such as ``max_bytes`` or ``verify``.

    Returns:
        What was done; its ``restore`` undoes it.

    Raises:
        UnsupportedModelError: Nothing in the model is known; it says what was looked for and found.
        OptionError: The model is accelerated already.
        CaptureFailedError: An encoder can't be captured; the model is as it was.
    """
    _check_model(model)
    _refuse_twice(model)
    options = Options(
        capture,
        buckets,
        max_tokens,
        max_images,
        Rewrites() if rewrites is None else rewrites,
        backend,
        merge,
        progress,
        manager,
    )
    sites = find_sites(model, options)
    options.check_names([site.name for site in sites])
    patches = Patches()
    done = Acceleration(tuple(sites), patches, weakref.ref(model))
    try:
        for site in sites:
            site.install(patches)
        if merge:
            for inner in merging_models(model):
                install_merge(inner, patches)
    except BaseException:
        done.restore()
        raise
    object.__setattr__(model, _ATTRIBUTE, done)
    return done


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`.

    Raises:
        OptionError: The model isn't accelerated.
    """
    _check_model(model)
    done: Acceleration | None = vars(model).get(_ATTRIBUTE)
    if done is None:
        raise OptionError(f"this {type(model).__name__} is not accelerated: there is nothing to undo")
    done.restore()


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a model of transformers, got {model!r}")


def _refuse_twice(model: nn.Module) -> None:
    """Raises OptionError where a model, a part of it, or a model that it is part of is accelerated."""
    if _ATTRIBUTE in vars(model):
        raise OptionError(f"this {type(model).__name__} is accelerated already: restore(model) first")
    for name, module in model.named_modules():
        if _ATTRIBUTE in vars(module) or any(isinstance(value, Replacement) for value in vars(module).values()):
            raise OptionError(
                f"{name or type(model).__name__} is part of an accelerated model already: restore that one first"
            )


def find_sites(model: nn.Module, options: Options) -> list[Site]:
    """The places in a model that mmgraph knows.

    Raises:
        UnsupportedModelError: None.
    """
    makers = site_makers()
    found: list[Site] = []
    for name, module in model.named_modules():
        make = makers.get(type(module).__name__)
        if make is not None:
            found.append(make(name, module, options))
    if not found:
        encoders = [
            f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if name.split(".")[-1] in ("visual", "vision_tower", "vision_model", "audio_tower", "encoder")
        ]
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no encoder that mmgraph knows; it has {', '.join(encoders) or 'none'}, and "
            f"known are {', '.join(sorted(makers))}. mmgraph.capture.CapturedEncoder serves any encoder by an adapter"
        )
    return found


def site_makers() -> dict[str, Callable[[str, Any, Options], Site]]:
    """By the name of transformers' class, what replaces it."""
    return {
        **dict.fromkeys(PACKED_TOWERS, PackedSite),
        **dict.fromkeys(FIXED_MODELS, FixedSite),
        "Qwen2AudioModel": AudioSite,
        "Kimi_K25Model": KimiSite,
    }


def merging_models(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that merge features into text."""
    return [module for _, module in model.named_modules() if merges(module)]
