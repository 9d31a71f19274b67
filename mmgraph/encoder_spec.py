"""What the embedder is told of each modality's encoder, and of the model beside it.

Promises: a spec that can't work is refused when it is made or first looked at, before anything is encoded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mmgraph.errors import EncoderSpecError
from mmgraph.modality import Modality

EncoderFn = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One modality's encoder.

    Attributes:
        fn: Takes the items, whose features are on the device, and returns their rows ``[rows, width]``, in
            order; other leading shapes are flattened, and a list of tensors is joined. As many tensors, or matrices of
            one tensor, as there are items are counted item by item.
        deepstack: The rows hold deepstack rows too, which the model's ``separate_deepstack_embeds`` takes
            apart.
        deepstack_form: What the language model takes: "dense", a tensor with zeros at text rows, or "sparse",
            the rows and a map for ``mmgraph.ops.deepstack_add``.
        needs_feature: Whether an item without a feature is an error.
        device: Where the features go; None: where ``input_ids`` are.
        takes_out: ``fn`` takes a keyword ``out`` too: memory of an `EncoderPool` ``[rows, width]``, in the pool's
            dtype, that it may write the rows to and return, to spare the copy; or None, where the rows found no room in
            one piece. Not with deepstack.

    Raises:
        EncoderSpecError: ``fn`` can't be called, or an unknown form.
    """

    fn: EncoderFn
    deepstack: bool = False
    deepstack_form: Literal["dense", "sparse"] = "dense"
    needs_feature: bool = True
    device: torch.device | str | None = None
    takes_out: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise EncoderSpecError(f"an encoder's fn must be a function of a list of items, got {self.fn!r}")
        if self.deepstack_form not in ("dense", "sparse"):
            raise EncoderSpecError(f"deepstack_form must be 'dense' or 'sparse', got {self.deepstack_form!r}")
        if self.takes_out and self.deepstack:
            raise EncoderSpecError(
                "an encoder with deepstack=True can't take out: its rows are taken apart before they are stored"
            )


Encoders = Mapping[Modality, EncoderSpec | EncoderFn]


def settled_specs(encoders: Encoders | None) -> dict[Modality, EncoderSpec]:
    """Give the encoders as specs; a bare function becomes a spec with the defaults.

    Raises:
        EncoderSpecError: Not a mapping, a key that isn't a modality, a value that isn't an encoder, or two forms
            of deepstack.
    """
    specs: dict[Modality, EncoderSpec] = {}
    if encoders is not None and not isinstance(encoders, Mapping):
        raise EncoderSpecError(
            f"encoders must be a mapping of Modality to EncoderSpec or function, got {type(encoders).__name__}; write "
            "{Modality.IMAGE: EncoderSpec(fn)}"
        )
    for modality, encoder in (encoders or {}).items():
        if not isinstance(modality, Modality):
            raise EncoderSpecError(f"encoders must be keyed by Modality, got {modality!r}")
        specs[modality] = encoder if isinstance(encoder, EncoderSpec) else EncoderSpec(encoder)
    forms = {spec.deepstack_form for spec in specs.values() if spec.deepstack}
    if len(forms) > 1:
        raise EncoderSpecError(f"all deepstack encoders of a model must name one form, got {sorted(forms)}")
    return specs


def deepstack_levels(model: Any) -> int:
    """Give the number of deepstack levels of a model.

    Raises:
        EncoderSpecError: The model lacks what deepstack takes.
    """
    if not callable(getattr(model, "separate_deepstack_embeds", None)) or not hasattr(
        model, "deepstack_visual_indexes"
    ):
        raise EncoderSpecError(
            "an encoder with deepstack=True needs a multimodal_model with separate_deepstack_embeds(rows) and "
            f"deepstack_visual_indexes, got {type(model).__name__}"
        )
    try:
        return len(model.deepstack_visual_indexes)
    except TypeError:
        raise EncoderSpecError(
            "the model's deepstack_visual_indexes must be a list with one entry for each level, got "
            f"{model.deepstack_visual_indexes!r} on {type(model).__name__}"
        ) from None
