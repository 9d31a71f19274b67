"""Optional packages: whether one is installed, found out without importing anything, and its import."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from mmgraph.ops.errors import BrokenBackend


def _find(name: str, part: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec of a module whose parent's folders are ``path``; ``part`` is the last part of its name."""
    # By that part alone: with a dotted name, a namespace package looks for its parent among the imported modules.
    spec = PathFinder.find_spec(part, path)
    others = (finder for finder in sys.meta_path if finder is not PathFinder)  # of editable installations, say
    while spec is None and (finder := next(others, None)) is not None:
        find_spec = getattr(finder, "find_spec", None)  # the import system passes over those without it, too
        spec = None if find_spec is None else find_spec(name, path)
    return spec


def is_installed(name: str) -> bool:
    """Whether a module is there, dotted names included; neither it nor its parents are imported.

    Two packages may share a folder (flash-attn and flash-attn-4 both lie in ``flash_attn``), so that the parent says
    nothing about the module, and importing a broken parent would hide it.
    """
    path: list[str] | None = None
    whole = ""
    spec: ModuleSpec | None = None
    for part in name.split("."):
        if whole and path is None:  # its parent is a file
            return False
        whole = f"{whole}.{part}" if whole else part
        spec = _find(whole, part, path)
        if spec is None:
            return False
        places = spec.submodule_search_locations
        path = None if places is None else list(places)
    return (
        spec is not None and spec.loader is not None
    )  # none: a folder with nothing in it, left by something else


def import_package(name: str, load: Callable[[], Any]) -> Any:
    """``load()``, or None if the module isn't installed at all.

    Raises:
        BrokenBackend: It is installed and can't be imported.
    """
    if not is_installed(name):
        return None
    try:
        return load()
    except Exception as error:
        raise BrokenBackend(
            f"{name} is installed but can't be imported ({type(error).__name__}: {error}); reinstall it for this torch "
            "or uninstall it."
        ) from error
