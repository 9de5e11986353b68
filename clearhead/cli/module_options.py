"""Models, factories and input specifications named on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from clearhead import hub
from clearhead.cli.options import LoadKwargs, option
from clearhead.errors import ClearheadError, ConfigError

if TYPE_CHECKING:
    from clearhead.analysis.checks import Embeddings, Ids, Values

    InputKind: TypeAlias = Ids | Embeddings | Values

VocabSize = Annotated[int | None, option("The module takes token ids smaller than this.")]
InputDim = Annotated[int | None, option("The module takes one vector of this width per token.")]
InputShape = Annotated[
    str | None, option("The module takes tensors of this shape (without the batch), for example 3,32,32.")
]


def is_factory(name: str) -> bool:
    """Whether a name is package.module:factory."""
    return ":" in name and not name.startswith("hf:") and not Path(name).exists()


def load_named(model: str, load: LoadKwargs | None = None) -> object:
    """Return the model of a name, or the result of a factory; `load` selects its device and its dtype."""
    from torch import nn

    from clearhead.analysis.checks import ModuleSpec

    if not is_factory(model):
        return hub.load(model, dtype=None) if load is None else hub.load(model, **load)
    target = import_target(model)
    if not isinstance(target, (nn.Module, ModuleSpec)):
        with user_code_errors(f"{model} could not be called without arguments"):
            target = target()
    if load is not None and isinstance(target, ModuleSpec) and isinstance(target.module, nn.Module):
        return replace(target, module=target.module.to(**load))
    return target.to(**load) if load is not None and isinstance(target, nn.Module) else target


@contextmanager
def user_code_errors(problem: str) -> Iterator[None]:
    """Convert errors of the user's code in the block to a ConfigError with `problem`, the error and its line."""
    from clearhead.analysis.inputs.module_errors import error_summary, source_line

    try:
        yield
    except ClearheadError:
        raise
    except (Exception, SystemExit) as error:
        location = source_line(error)
        raise ConfigError(f"{problem}: {error_summary(error)}{f' (at {location})' if location else ''}") from error


def import_target(name: str) -> Any:
    """Return what `package.module:factory` names, which is also searched in the current folder.

    This runs the user's code."""
    from torch import nn

    from clearhead.analysis.checks import ModuleSpec

    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ConfigError(f"{name!r} does not name a Python module; expected package.module:factory, without .py or /")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_code_errors(f"{module!r} cannot be imported from {folder}"):
        target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{module} has no {attribute!r}; give module:factory, a function that returns the model")
        target = getattr(target, part)
    if not callable(target) and not isinstance(target, (nn.Module, ModuleSpec)):
        raise ConfigError(f"{name} has the type {type(target).__name__}; expected a function that returns a module")
    return target


def input_spec(vocab_size: int | None, input_dim: int | None, input_shape: str | None) -> dict[str, InputKind]:
    """Return the input specification of a module as a keyword argument, or nothing if no option is given."""
    from clearhead.analysis.checks import Embeddings, Ids, Values

    specs: list[InputKind] = [Ids(vocab_size)] if vocab_size is not None else []
    specs += [Embeddings(input_dim)] if input_dim is not None else []
    if input_shape is not None:
        try:
            specs.append(Values(tuple(map(int, input_shape.split(",")))))
        except ValueError:
            example = "expected sizes separated by commas, such as 3,32,32"
            raise ConfigError(f"--input-shape is {input_shape!r}; {example}") from None
    if len(specs) > 1:
        message = "a module takes one kind of input; give one of --vocab-size, --input-dim and --input-shape"
        raise ConfigError(message)
    return {"inputs": specs[0]} if specs else {}
