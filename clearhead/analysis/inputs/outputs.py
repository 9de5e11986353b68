"""Find the tensors in the output (or input) of a module: a tensor, tuple, mapping or output object."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clearhead.errors import DtypeError

_MAIN_NAMES = ("logits", "last_hidden_state")


def first_tensor(value: object) -> Tensor | None:
    """Return the main tensor of an input or output with several values: the logits, or the first tensor."""
    if isinstance(value, Tensor):
        return value
    key = _main_key(value)
    if isinstance(value, Mapping):
        value = tuple(value.values()) if key is None else value[key]
        return first_tensor(value)
    if isinstance(value, (tuple, list)):
        return next((x for x in map(first_tensor, value) if x is not None), None)
    return None if key is None else first_tensor(getattr(value, key))


def output_tensor(output: object) -> Tensor:
    """Return the main floating-point tensor of a module's output, or raise DtypeError."""
    main = first_tensor(output)
    if main is not None and not main.is_floating_point():
        main = next(iter(all_tensors(output)), None)
    if main is None:
        raise DtypeError(
            f"the module returned a {type(output).__name__}; expected a tensor, or a tuple, dict or "
            "object that contains one; pass run=, a function of (module, inputs) that returns it"
        )
    return main


def all_tensors(output: object) -> list[Tensor]:
    """Return every floating-point tensor of a module output, because a loss can depend on any of them."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in all_tensors(part)]
    return []


def replace_first_tensor(value: Any, new: Tensor) -> object:
    """Return the same structure with the tensor that `first_tensor` finds replaced."""
    if isinstance(value, Tensor):
        return new
    key = _main_key(value)
    if not isinstance(value, (Mapping, tuple, list)):
        changed = copy.copy(value)
        object.__setattr__(changed, str(key), new)  # also of a frozen dataclass
        return changed
    parts = dict(value if isinstance(value, Mapping) else enumerate(value))
    names = (name for name, part in parts.items() if first_tensor(part) is not None)
    name = next(names) if key is None else key
    parts[name] = replace_first_tensor(parts[name], new)
    if isinstance(value, Mapping):
        return type(value)(**parts)
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())


def _main_key(value: object) -> str | None:
    """Return the name of the main value of a mapping or an output object, if it has a usual one."""
    for name in _MAIN_NAMES:
        part = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(part, Tensor):
            return name
    return None
