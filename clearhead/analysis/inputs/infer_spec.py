"""Infer how a module is called, so that `check(model)` needs no options for known models.

Options of the caller take precedence. An unknown module needs at least `inputs=`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from clearhead._core.call_types import Kwargs
from clearhead._core.keywords import keyword_error
from clearhead._core.validation import check_int
from clearhead.analysis.inputs import builtin, third_party
from clearhead.analysis.inputs.module_spec import (
    INPUTS_IN_WORDS,
    Caching,
    IgnoreMask,
    Inputs,
    KeepMask,
    ModuleSpec,
    direct_run,
)
from clearhead.errors import ConfigError, DtypeError
from clearhead.masks import Mask, causal, full

# Argument names with an established polarity. `mask` is used with both polarities, so it is not inferred.
_PADDING_NAMES = (
    IgnoreMask("key_padding_mask"),
    IgnoreMask("src_key_padding_mask"),
    KeepMask("attention_mask"),
    KeepMask("keep"),
)

_OPTIONS = {field.name for field in dataclasses.fields(ModuleSpec)} - {
    "module",
    "takes_padding",
    "takes_target_padding",
}
_OPTIONS |= {"causal", "padding", "target_padding"}
_INPUTS = (Inputs, INPUTS_IN_WORDS)
_PADDING = ((KeepMask, IgnoreMask), 'KeepMask("argument") or IgnoreMask("argument")')
_YES_OR_NO = (bool, "True or False")
_EXPECTED: dict[str, tuple[Any, str]] = {
    "inputs": _INPUTS,
    "source": _INPUTS,
    "padding": _PADDING,
    "target_padding": _PADDING,
    "caching": (Caching, "Caching(new=…)"),
    "mask": (Mask, "a mask such as causal() or full()"),
    "run": (Callable, "a function of (module, inputs)"),
    "causal": _YES_OR_NO,
    "positions": _YES_OR_NO,
    "left_padding": _YES_OR_NO,
    "left_target_padding": _YES_OR_NO,
}


def spec_for(module: object, **options: Any) -> ModuleSpec:
    """Return the `ModuleSpec` of a module or function.

    Args:
        module: A module, a function of tensors, or a `ModuleSpec` to be changed.
        **options: Fields of `ModuleSpec`, if they are unknown or inferred incorrectly, or their short forms: `causal`
            (instead of `mask`), and `padding` and `target_padding` (`KeepMask("argument")` or
            `IgnoreMask("argument")`; for an encoder-decoder `padding` is the padding of the source).

    Raises:
        ConfigError: An option is invalid, or the inputs of the module cannot be inferred.

    Example:
        >>> spec_for(net, inputs=Ids(101), causal=True, padding=KeepMask("mask"))
    """
    for name, value in options.items():
        if name not in _OPTIONS:
            raise keyword_error(name, _OPTIONS, "check")
        kinds, expected = _EXPECTED.get(name, (object, ""))
        if value is not None and not isinstance(value, kinds):
            raise ConfigError(f"{name} is {value!r}; expected {expected}")
        if name in ("layers", "max_len") and value is not None:
            check_int(value, name, minimum=1)
    if isinstance(module, ModuleSpec):
        return _with_options(module, options)
    if not callable(module):
        raise DtypeError(f"got a {type(module).__name__}; expected a PyTorch module or a function of tensors")
    spec = builtin.infer_builtin(module) or third_party.infer_third_party(module)
    if spec is None:
        if options.get("inputs") is None:
            label = options.get("name") or getattr(module, "__name__", type(module).__name__)
            raise ConfigError(
                f"cannot infer the inputs of {label}; pass inputs={INPUTS_IN_WORDS} "
                "(on the command line: --vocab-size, --input-dim or --input-shape)"
            )
        spec = ModuleSpec(module, inputs=options["inputs"], caching=options.get("caching"))
        if options.get("padding") is None and "run" not in options:
            options["padding"] = _infer_padding(module)
    return _with_options(spec, options)


def _with_options(spec: ModuleSpec, options: Kwargs) -> ModuleSpec:
    is_causal = options.pop("causal", None)
    padding = options.pop("padding", None)
    target_padding = options.pop("target_padding", None)
    if is_causal is not None and "mask" not in options:
        options["mask"] = causal() if is_causal else full()
    if "run" not in options and (padding is not None or target_padding is not None):
        for mask in (padding, target_padding):
            _check_argument(spec, mask)
        options["run"] = direct_run(padding, options.get("caching", spec.caching), target_padding)
    options["takes_padding"] = spec.takes_padding or padding is not None
    options["takes_target_padding"] = spec.takes_target_padding or target_padding is not None
    return dataclasses.replace(spec, **options)


def _infer_padding(module: Callable[..., object]) -> KeepMask | IgnoreMask | None:
    names = _parameters(module)
    return next((padding for padding in _PADDING_NAMES if padding.argument in names), None)


def _check_argument(spec: ModuleSpec, mask: KeepMask | IgnoreMask | None) -> None:
    """Raise ConfigError if the module does not take the argument of a padding mask."""
    parameters = _parameters(spec.module)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if mask is not None and parameters and not takes_any and mask.argument not in parameters:
        raise ConfigError(
            f"{spec.name} has no argument {mask.argument!r} for a padding mask; its arguments are "
            f"{', '.join(parameters)}"
        )


def _parameters(module: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the module's call; none if they are unknown."""
    try:
        return inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters
    except (TypeError, ValueError):
        return {}
