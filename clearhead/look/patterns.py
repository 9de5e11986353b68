"""What a trace is asked to keep: patterns over module paths, and what each of them means for a given model.

    blocks.*.attention.weights     the attention weights of these layers
    blocks.*.output                what these modules return
    head.input                     what this module is given
    blocks.*.attention             no ending: weights of an attention layer, the output of anything else

`*` stands for one name between dots (or a part of one), `**` for any number of names. The model itself has the empty
path: `output` is what it returns. A module that is really called `output` is meant before the ending is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from clearhead.attention import MultiHeadAttention
from clearhead.errors import ConfigError
from clearhead.values import did_you_mean

KINDS = ("weights", "output", "input")

Asked = dict[str, set[str]]
"""Module paths, by what is to be kept of them: one of `KINDS`."""


def is_attention(module: nn.Module) -> bool:
    """Whether this is an attention layer by its type."""
    return isinstance(module, (MultiHeadAttention, nn.MultiheadAttention))


def may_attend(module: nn.Module) -> bool:
    """Whether its code may call attention: any class can, but of torch's own only `nn.MultiheadAttention` does."""
    return is_attention(module) or not type(module).__module__.startswith("torch.nn.modules.")


def asked_of(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> Asked:
    """The modules that these patterns name; without patterns, the weights of everything that attends."""
    asked: Asked = {kind: set() for kind in KINDS}
    if not patterns:
        asked["weights"].update(path for path, module in modules.items() if may_attend(module))
    for pattern in patterns:
        found = [path for path in modules if matches(pattern, path)]
        for path in found:
            asked["weights" if is_attention(modules[path]) else "output"].add(path)
        front, _, ending = pattern.rpartition(".")
        if not found and ending in KINDS:
            found = [path for path in modules if matches(front, path)]
            if ending == "weights":
                found = [path for path in found if may_attend(modules[path])]
            asked[ending].update(found)
        if not found:
            raise _unknown(pattern, front if ending in KINDS else pattern, modules)
    return asked


def matches(pattern: str, path: str) -> bool:
    """Whether a module path is one of those that a pattern (without an ending) names.

    In one name, `*` is any characters, `?` one, `[01]` one of these, `[!01]` any other."""
    return _fit(*(text.split(".") if text else [] for text in (pattern, path)))


def _fit(wanted: list[str], names: list[str]) -> bool:
    if wanted[:1] == ["**"]:
        return any(_fit(wanted[1:], names[i:]) for i in range(len(names) + 1))
    if not wanted or not names:
        return wanted == names
    return fnmatchcase(names[0], wanted[0]) and _fit(wanted[1:], names[1:])


def _unknown(pattern: str, front: str, modules: Mapping[str, nn.Module]) -> ConfigError:
    layers = [path for path, module in modules.items() if is_attention(module)]
    near = did_you_mean(front, modules, otherwise="")
    meant = f"{near} Its" if near else "its"
    shown = ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return ConfigError(
        f"nothing in this model is called {pattern!r}; {meant} attention layers are: {shown or 'none'} "
        f"(* stands for one name between dots, ** for any number; endings are .weights, .output and .input)"
    )
