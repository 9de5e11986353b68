"""What a name or an option on the command line stands for: a model, somebody's factory, what a module reads."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from clearhead.cli.options import option
from clearhead.errors import ConfigError

MaybeIds = Annotated[int | None, option("A factory's module reads token numbers, of so many.")]
MaybeEmbeddings = Annotated[int | None, option("It reads vectors of this width, one a token.")]
MaybeValues = Annotated[str | None, option("It reads blocks of numbers that are no sequence, such as 3,32,32.")]


def is_factory(name: str) -> bool:
    """Whether a name is package.module:factory."""
    return ":" in name and not name.startswith("hf:") and not Path(name).exists()


def named(model: str, **place: Any) -> Any:
    """What a name on the command line stands for: a model, or what a factory makes; on a device, in a dtype."""
    from torch import nn

    from clearhead.checks import ModuleSpec
    from clearhead.pretrained import load_model

    if not is_factory(model):
        return load_model(model, **place)
    found = imported(model)
    if not isinstance(found, (nn.Module, ModuleSpec)):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(f"{model} could not be called without arguments: {error}") from error
    if place and isinstance(found, ModuleSpec) and isinstance(found.module, nn.Module):
        return replace(found, module=found.module.to(**place))
    return found.to(**place) if place and isinstance(found, nn.Module) else found


def imported(name: str) -> Any:
    """What `package.module:factory` names, from the folder you are in too: a function, or what it would make. This runs
    the user's code, which was asked for by naming it."""
    from torch import nn

    from clearhead.checks import ModuleSpec

    place, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{name!r} does not name a Python module; expected package.module:factory")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{place!r} cannot be imported from {here}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{place} has no {attribute!r}; give module:factory, a function that returns the model")
        found = getattr(found, part)
    if not callable(found) and not isinstance(found, (nn.Module, ModuleSpec)):
        raise ConfigError(f"{name} is a {type(found).__name__}; expected a function that returns a module")
    return found


def inputs_of(ids: int | None, embeddings: int | None, values: str | None) -> dict[str, Any]:
    """What the module reads, if it was said: one of the three."""
    from clearhead.checks import Embeddings, Ids, Values

    said: list[Any] = [Ids(ids)] if ids is not None else []
    said += [Embeddings(embeddings)] if embeddings is not None else []
    if values is not None:
        try:
            said.append(Values(tuple(map(int, values.split(",")))))
        except ValueError:
            example = "expected sizes with commas between them, such as 3,32,32"
            raise ConfigError(f"--values is {values!r}; {example}") from None
    if len(said) > 1:
        raise ConfigError("a module reads one kind of input: give --ids, --embeddings or --values")
    return {"inputs": said[0]} if said else {}
