"""One count for the process that moves on whenever a module gets a parameter, a buffer or a submodule.

It tells a guard that it is worth looking at everything again. It sees what goes through `torch.nn.Module`
(attributes that are set, `register_*`, `load_state_dict`), not what writes into a module's tables or a tensor's
data: a guard finds those by looking.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

__all__ = ["advance", "count", "install", "notice_loads"]

_lock = threading.Lock()
_count = 0
_installed = False


def count() -> int:
    """The count now."""
    return _count


def advance() -> None:
    """Moves the count on."""
    global _count
    with _lock:
        _count += 1


def install() -> None:
    """Has every module of the process move the count on; the first call does it, for good."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    hooks.register_module_parameter_registration_hook(_registered)
    hooks.register_module_buffer_registration_hook(_registered)
    hooks.register_module_module_registration_hook(_registered)


def notice_loads(module: torch.nn.Module) -> RemovableHandle:
    """Has `module.load_state_dict` move the count on, however the module takes what it loads.

    The module can be copied and pickled meanwhile; what is made from it has the hook, too.
    """
    handle: RemovableHandle = module.register_load_state_dict_post_hook(_loaded)
    return handle


# Functions of this file, so that a module with such a hook is pickled by their names.
def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    # What is bound there already is bound again by `self.steps += 1`, in a step that replaces nothing.
    tables = (module._parameters, module._buffers, module._modules)
    if not any(table.get(name, advance) is value for table in tables):
        advance()


def _loaded(module: torch.nn.Module, incompatible_keys: Any) -> None:
    advance()
