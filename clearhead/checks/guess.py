"""How a module is called, guessed from what it is, so that `check(model)` needs no more for models that are known.

The caller's words always win. A module that is not known needs at least `inputs=`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from clearhead.checks import foreign, ours
from clearhead.checks.subject import (
    INPUTS_IN_WORDS,
    Caching,
    Embeddings,
    Ids,
    Inputs,
    Subject,
    TrueIsHidden,
    TrueIsReal,
    Values,
    direct_run,
)
from clearhead.errors import ConfigError, DtypeError
from clearhead.masks import causal, full

# Names whose meaning is settled by those who made them popular. `mask` alone means either, and is not guessed.
_PADDING_NAMES = (
    TrueIsHidden("key_padding_mask"),
    TrueIsHidden("src_key_padding_mask"),
    TrueIsReal("attention_mask"),
    TrueIsReal("keep"),
)

_FIELDS = {field.name for field in dataclasses.fields(Subject)} - {"module", "pads", "pads_target"}
_WORDS = _FIELDS | {"causal", "padding", "target_padding"}


def subject_of(module: Any, **how: Any) -> Subject:
    """The `Subject` for a module or function; `how` says what is not known or guessed wrongly.

    Words: `inputs` and `source` (`Ids(vocab_size)`, `Embeddings(width)`, `Values(shape)`), `causal` (or `sees`, a
    mask), `padding` (`TrueIsReal("argument")`, `TrueIsHidden("argument")`; of the source, where there is one) and
    `target_padding`, `caching`, `positions`, `scale`, `left`, `left_target`, `layers`, `max_len`, `name`, and `run`,
    a function of (module, batch) for whatever is called in no ordinary way."""
    _check_words(how)
    if isinstance(module, Subject):
        return _changed(module, how)
    if not callable(module):
        raise DtypeError(f"got a {type(module).__name__}; expected a PyTorch module or a function of tensors")
    for guess in (ours.guess, foreign.guess):
        found = guess(module)
        if found is not None:
            return _changed(found, how)
    told = ("inputs", "padding", "target_padding")
    return _changed(_unknown(module, how), {k: v for k, v in how.items() if k not in told})


def _changed(subject: Subject, how: dict[str, Any]) -> Subject:
    how = dict(how)
    wanted = how.pop("causal", None)
    if wanted is not None and "sees" not in how:
        how["sees"] = causal() if wanted else full()
    padding, of_target = how.pop("padding", None), how.pop("target_padding", None)
    if "run" in how:
        how.setdefault("caching", subject.caching)
    elif padding is not None or of_target is not None:
        how["run"] = direct_run(padding, how.get("caching", subject.caching), of_target)
    how["pads"] = subject.pads or padding is not None
    how["pads_target"] = subject.pads_target or of_target is not None
    return dataclasses.replace(subject, **how)


def _unknown(module: Callable[..., Any], how: dict[str, Any]) -> Subject:
    inputs: Inputs | None = how.get("inputs")
    if inputs is None:
        name = how.get("name") or getattr(module, "__name__", type(module).__name__)
        raise ConfigError(
            f"cannot tell what {name} takes as input; pass inputs={INPUTS_IN_WORDS} "
            "(on the command line: --ids, --embeddings or --values)"
        )
    padding, caching, of_target = how.get("padding"), how.get("caching"), how.get("target_padding")
    if padding is None and "run" not in how:
        padding = _guessed_padding(module)
    pads = padding is not None
    run = how.get("run") or direct_run(padding, caching, of_target)
    return Subject(
        module=module,
        name=how.get("name", ""),
        inputs=inputs,
        run=run,
        pads=pads,
        pads_target=of_target is not None,
        caching=caching,
    )


def _guessed_padding(module: Callable[..., Any]) -> TrueIsReal | TrueIsHidden | None:
    try:
        call = module.forward if isinstance(module, nn.Module) else module
        names = set(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return None
    return next((padding for padding in _PADDING_NAMES if padding.argument in names), None)


def _check_words(how: dict[str, Any]) -> None:
    for word in how:
        if word not in _WORDS:
            raise ConfigError(f"check knows no {word!r}; it knows: {', '.join(sorted(_WORDS))}")
    for word in ("inputs", "source"):
        kind = how.get(word)
        if kind is not None and not isinstance(kind, (Ids, Embeddings, Values)):
            raise ConfigError(f"{word} is {kind!r}; expected {INPUTS_IN_WORDS}")
    for word in ("padding", "target_padding"):
        told = how.get(word)
        if told is not None and not isinstance(told, (TrueIsReal, TrueIsHidden)):
            raise ConfigError(f'{word} is {told!r}; expected TrueIsReal("argument") or TrueIsHidden("argument")')
    caching = how.get("caching")
    if caching is not None and not isinstance(caching, Caching):
        raise ConfigError(f"caching is {caching!r}; expected Caching(new=…)")
