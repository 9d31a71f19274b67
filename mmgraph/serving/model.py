"""A Qwen3-VL from transformers: seeded random weights, small or of real size, or a checkpoint on this machine.

Nothing is ever downloaded. The modules and weights are transformers' own; the tower and the language loop of
this package only call them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmgraph.serving.errors import MissingExtraError, ModelError

REAL_TEXT_LAYERS = 4
"""How many of the 36 language layers of the 8B model the real-size configuration keeps."""


_TRANSFORMERS = (5, 17)


@dataclass(frozen=True)
class ImageLimits:
    """Pixels of a photo after resizing, at least and at most."""

    min_pixels: int
    max_pixels: int


SMALL_LIMITS = ImageLimits(64 * 64, 224 * 224)
REAL_LIMITS = ImageLimits(256 * 256, 1024 * 1024)


def small_config() -> Any:
    """A Qwen3-VL configuration that a CPU runs in moments, with every feature of the real one.

    Deepstack from three vision layers, interleaved three-row rotary positions, grouped-query attention, an
    interpolated position table, a head width of 24 in the tower (no power of two, like the real 72).
    """
    _require_transformers()
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        vision_config={
            "depth": 6,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_heads": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [1, 2, 4],
        },
        text_config={
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        image_token_id=2044,
        video_token_id=2045,
        vision_start_token_id=2046,
        vision_end_token_id=2047,
    )


def real_config(text_layers: int = REAL_TEXT_LAYERS) -> Any:
    """The 8B model's vision tower, whole, and its first language layers at their real size.

    Args:
        text_layers: How many of the language layers.
    """
    _require_transformers()
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        vision_config={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        text_config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": text_layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
    )


def random_model(config: Any, *, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build the model with random weights that the seed decides.

    Args:
        config: A ``Qwen3VLConfig``.
        device: Where the weights are made; a seed gives other weights on another kind of device.
        dtype: The weights' dtype.
        seed: The seed. The process's own random state is left as it was.

    Returns:
        A ``Qwen3VLForConditionalGeneration`` in evaluation mode that needs no gradients.
    """
    _require_transformers()
    from transformers import Qwen3VLForConditionalGeneration

    devices = [device] if device.type == "cuda" else []
    for part in (config, config.vision_config, config.text_config):
        part.dtype = dtype
        part._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=dtype)
        _spread(model, torch.Generator(device).manual_seed(seed + 1))
    return model.eval().requires_grad_(False)


def load_checkpoint(path: str | Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a Qwen3-VL checkpoint from a folder on this machine.

    Args:
        path: The folder, as ``save_pretrained`` leaves it.
        device: Where the weights go.
        dtype: What they are cast to.

    Returns:
        A ``Qwen3VLForConditionalGeneration`` in evaluation mode that needs no gradients.

    Raises:
        ModelError: No such folder, not a Qwen3-VL, or weights that don't load.
    """
    path = Path(path)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(f"--model takes a checkpoint folder with a config.json, and {str(path)!r} has none")
    try:
        kind = json.loads(config_file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{str(config_file)!r} is not a readable configuration ({error})") from error
    if kind != "qwen3_vl":
        raise ModelError(
            f"--model takes a Qwen3-VL checkpoint (model_type 'qwen3_vl'), and {str(path)!r} is {kind!r}"
        )
    _require_transformers()
    from transformers import Qwen3VLForConditionalGeneration

    try:
        model, info = Qwen3VLForConditionalGeneration.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, attn_implementation="sdpa", output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds; the user needs the folder and the reason
        raise ModelError(f"the checkpoint in {str(path)!r} could not be loaded: {error}") from error
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"the checkpoint in {str(path)!r} lacks {len(missing)} weight(s), {missing[0]!r} among them: "
            "they would be random; give the whole checkpoint"
        )
    return model.to(device).eval().requires_grad_(False)


def image_processor(config: Any, limits: ImageLimits, path: str | Path | None = None) -> Any:
    """transformers' own image processor of this family, on Pillow also where torchvision is installed.

    Args:
        config: The model's configuration; it gives patch and merge sizes.
        limits: The smallest and largest number of pixels.
        path: A checkpoint folder; its ``preprocessor_config.json``, where there is one, gives mean and
            deviation.

    Returns:
        A processor: called with ``images=[...]`` it returns ``pixel_values`` and ``image_grid_thw``.

    Raises:
        MissingExtraError: transformers or Pillow is not installed.
    """
    _require_transformers()
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = config.vision_config
    settings: dict[str, Any] = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    file = None if path is None else Path(path) / "preprocessor_config.json"
    if file is not None and file.is_file():
        saved = json.loads(file.read_text())
        settings |= {key: saved[key] for key in ("image_mean", "image_std", "rescale_factor") if key in saved}
    return Qwen2VLImageProcessorPil(**settings)


@contextmanager
def raised_precision(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[torch.nn.Module]:
    """Within the block the weights are of the wider ``dtype``; afterwards they are as before, bit for bit.

    It must not be used once graphs that read the weights are captured: their addresses change.

    Args:
        model: The model.
        dtype: float32 or float64, not narrower than any floating weight.
    """
    tensors = [*model.parameters(), *model.buffers()]
    kept = [(t, t.dtype) for t in tensors if t.is_floating_point() and t.dtype != dtype]
    for tensor, _ in kept:
        tensor.data = tensor.data.to(dtype)
    try:
        yield model
    finally:
        for tensor, own in kept:
            tensor.data = tensor.data.to(own)


def _spread(model: Any, generator: torch.Generator) -> None:
    """Give norms and biases random values, where transformers starts them at one and zero.

    With them the loop's checks also see a norm or bias that is left out or added twice.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise = torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, 0.1, generator=generator)
            parameter.data.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def _require_transformers() -> None:
    """transformers, not older than the model family needs, and Pillow.

    Raises:
        MissingExtraError: One of them is missing or too old.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pillow") from error
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _TRANSFORMERS:
        wanted = ".".join(map(str, _TRANSFORMERS))
        raise MissingExtraError("transformers", f">= {wanted} (here is {transformers.__version__})")
