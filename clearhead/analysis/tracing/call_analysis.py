"""Decide from the code of a module whether it may call attention itself, so that the others need no hooks.

A hook costs more than a small layer, and a torch function mode slows every torch call of the modules in which it is
active. Most modules of a model (feed-forward networks, norms, activations) call torch functions, their own methods and
other modules only. The names that a method uses show that. A module whose code uses any other function may attend.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import torch
from torch import Tensor, nn

from clearhead.nn import MultiHeadAttention

_ATTENTION_FUNCTIONS = {"attend", "scaled_dot_product_attention", "multi_head_attention_forward", "softmax"}
_LIBRARIES = {"torch", "math", "builtins", "typing", "itertools", "functools", "collections", "warnings"}
_CONSTANTS = (type, int, float, str, tuple, torch.dtype, logging.Logger)


def is_attention_layer(module: nn.Module) -> bool:
    """Return whether this module is an attention layer by its type."""
    return isinstance(module, (MultiHeadAttention, nn.MultiheadAttention))


def can_attend(module: nn.Module) -> bool:
    """Return whether the module's class may attend; of torch's own classes only `nn.MultiheadAttention` does."""
    return is_attention_layer(module) or not type(module).__module__.startswith("torch.nn.modules.")


def calls_attention(module: nn.Module) -> bool:
    """Return whether the module's own code may call attention."""
    if is_attention_layer(module):
        return True
    if not can_attend(module):
        return False
    kind: Hashable = type(module)  # type: ignore[assignment]  # mypy looks for the hash of an instance
    if _class_calls_attention(kind) or any(isinstance(child, nn.Softmax) for child in module.children()):
        return True
    is_clearhead = type(module).__module__.startswith("clearhead.")
    return not is_clearhead and any(map(_is_unknown_function, vars(module).values()))


def _is_unknown_function(attribute: object) -> bool:
    """Return whether an attribute of a module is a function that may attend."""
    if not callable(attribute) or isinstance(attribute, (nn.Module, Tensor)):
        return False
    return getattr(attribute, "__name__", "") in _ATTENTION_FUNCTIONS or not _is_harmless(attribute)


def calls_torch_attention(module: nn.Module) -> bool:
    """Return whether the module's own code may call torch's attention function, other than inside `attend`."""
    return not type(module).__module__.startswith(("torch.nn.modules.", "clearhead.")) and calls_attention(module)


@functools.lru_cache(maxsize=4096)
def _class_calls_attention(kind: Hashable) -> bool:
    assert isinstance(kind, type)
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name != "__init__" and _function_calls_attention(value):
                return True
    return False


def _function_calls_attention(function: FunctionType) -> bool:
    function = inspect.unwrap(function)
    is_clearhead = function.__module__.startswith("clearhead.")
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if _ATTENTION_FUNCTIONS & {*code.co_names, *code.co_freevars}:
            return True
        names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        if not is_clearhead and not all(_is_harmless(function.__globals__.get(name)) for name in names):
            return True
    return False


def _is_harmless(value: object) -> bool:
    """Return whether a global name cannot lead to attention: a library, a function of one, a class or a constant."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return (value.__module__ or "").partition(".")[0] in _LIBRARIES
    return value is None or isinstance(value, _CONSTANTS)


def modules_to_hook(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules of a model, by path, whose hooks find all attention calls.

    They are the model, the modules that call attention, and the outermost blocks inside these that do not, so that
    torch's function is not intercepted there.
    """
    hooked: list[nn.Module] = []
    intercepts = {"": False}  # whether torch's function is intercepted in each module
    for path, module in modules.items():  # parents come before their children
        is_intercepted = intercepts.get(path.rpartition(".")[0], False)
        if calls_attention(module) or not path:
            hooked.append(module)
            is_intercepted = calls_torch_attention(module)
        elif is_intercepted and not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and module._modules:
            hooked.append(module)
            is_intercepted = False
        intercepts[path] = is_intercepted
    return hooked
