"""Real photos from the installed wheels of scikit-image and scikit-learn, or from a folder. Never downloaded.

Only files that ship inside the wheels are read, by their path in the installed package; the packages themselves
are not imported, so none of their download helpers can run.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmgraph.serving.errors import MissingExtraError, PhotoError

_PACKAGED: tuple[tuple[str, str, str], ...] = (
    ("skimage", "data", "astronaut.png"),
    ("skimage", "data", "coffee.png"),
    ("skimage", "data", "chelsea.png"),
    ("sklearn", "datasets/images", "china.jpg"),
    ("skimage", "data", "hubble_deep_field.jpg"),
    ("skimage", "data", "motorcycle_left.png"),
    ("sklearn", "datasets/images", "flower.jpg"),
    ("skimage", "data", "rocket.jpg"),
    ("skimage", "data", "ihc.png"),
    ("skimage", "data", "retina.jpg"),
    ("skimage", "data", "coins.png"),
    ("skimage", "data", "motorcycle_right.png"),
)
"""Package, folder in it, file; the order is the order of use. Most aspect ratios and sizes differ."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings that ``--images DIR`` takes for photos; other files are passed over without a word."""


@dataclass(frozen=True, eq=False)
class Photo:
    """A decoded photo.

    Attributes:
        name: The file's name.
        source: The package or folder that it came from.
        pixels: uint8 ``[height, width, 3]``, RGB.
    """

    name: str
    source: str
    pixels: npt.NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return int(self.pixels.shape[1]), int(self.pixels.shape[0])


def packaged_photos(limit: int | None = None) -> list[Photo]:
    """The photos inside the installed scikit-image and scikit-learn, in a fixed order.

    Args:
        limit: Read at most this many; all of them when None.

    Returns:
        The photos. Files that an older wheel doesn't hold are left out.

    Raises:
        MissingExtraError: Pillow, scikit-image or scikit-learn is not installed.
        PhotoError: Both packages are there and neither holds a known photo.
    """
    roots = {package: _package_folder(package, project) for package, project in _PROJECTS.items()}
    paths = [(package, roots[package] / folder / file) for package, folder, file in _PACKAGED]
    photos = [_read(path, package) for package, path in [p for p in paths if p[1].is_file()][:limit]]
    if not photos:
        places = ", ".join(str(root) for root in roots.values())
        raise PhotoError(
            f"none of the known photos is in {places}: the packages there hold no data files; "
            "reinstall scikit-image and scikit-learn from their wheels, or use --images DIR"
        )
    return photos


def folder_photos(folder: str | Path, limit: int | None = None) -> list[Photo]:
    """The photos in a folder (not in its subfolders), by name. A file that can't be read is a warning.

    Args:
        folder: The folder.
        limit: Read at most this many; all of them when None.

    Returns:
        The readable photos, at least one.

    Raises:
        MissingExtraError: Pillow is not installed.
        PhotoError: There is no such folder, or nothing in it can be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PhotoError(f"--images takes a folder with photos, and {str(folder)!r} is not a folder")
    candidates = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
    photos: list[Photo] = []
    for path in candidates:
        if limit is not None and len(photos) >= limit:
            break
        try:
            photos.append(_read(path, str(folder)))
        except PhotoError as error:
            warnings.warn(f"{error}; passed over", stacklevel=2)
    if not photos:
        raise PhotoError(
            f"no photo could be read in {str(folder)!r}: {len(candidates)} file(s) end in one of "
            f"{' '.join(SUFFIXES)}; put at least one readable photo there, or leave --images out"
        )
    return photos


_PROJECTS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}


def _package_folder(package: str, project: str) -> Path:
    spec = importlib.util.find_spec(package)
    locations: Sequence[str] = [] if spec is None else list(spec.submodule_search_locations or [])
    if not locations:
        raise MissingExtraError(project)
    return Path(locations[0])


def _read(path: Path, source: str) -> Photo:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow") from error
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PhotoError(f"{str(path)!r} can't be read as a photo ({error})") from error
    return Photo(path.name, source, pixels)
