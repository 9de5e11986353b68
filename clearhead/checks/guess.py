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
from clearhead.checks.subject import INPUTS_IN_WORDS, Caching, Inputs, Subject, TrueIsHidden, TrueIsReal, direct_run
from clearhead.errors import ConfigError, DtypeError
from clearhead.masks import causal, full

# Names whose meaning is settled by those who made them popular. `mask` alone means either, and is not guessed.
_PADDING_NAMES = (
    TrueIsHidden("key_padding_mask"), TrueIsHidden("src_key_padding_mask"), TrueIsReal("attention_mask"),
    TrueIsReal("keep"),
)  # fmt: skip

_WORDS = {field.name for field in dataclasses.fields(Subject)} - {"module", "pads", "pads_target"}
_WORDS |= {"causal", "padding", "target_padding"}
_INPUTS = (Inputs, INPUTS_IN_WORDS)
_PADDING = ((TrueIsReal, TrueIsHidden), 'TrueIsReal("argument") or TrueIsHidden("argument")')
_EXPECTED: dict[str, tuple[Any, str]] = {
    "inputs": _INPUTS, "source": _INPUTS, "padding": _PADDING, "target_padding": _PADDING,
    "caching": (Caching, "Caching(new=…)"),
}  # fmt: skip


def subject_of(module: Any, **how: Any) -> Subject:
    """The `Subject` for a module or function; `how` says what is not known or guessed wrongly.

    Words: `inputs` and `source` (`Ids(vocab_size)`, `Embeddings(width)`, `Values(shape)`), `causal` (or `sees`, a
    mask), `padding` (`TrueIsReal("argument")`, `TrueIsHidden("argument")`; of the source, where there is one) and
    `target_padding`, `caching`, `positions`, `scale`, `left`, `left_target`, `layers`, `max_len`, `name`, and `run`,
    a function of (module, batch) for whatever is called in no ordinary way."""
    for word, value in how.items():
        if word not in _WORDS:
            raise ConfigError(f"check knows no {word!r}; it knows: {', '.join(sorted(_WORDS))}")
        kinds, expected = _EXPECTED.get(word, (object, ""))
        if value is not None and not isinstance(value, kinds):
            raise ConfigError(f"{word} is {value!r}; expected {expected}")
    if isinstance(module, Subject):
        return _changed(module, how)
    if not callable(module):
        raise DtypeError(f"got a {type(module).__name__}; expected a PyTorch module or a function of tensors")
    found = ours.guess(module) or foreign.guess(module)
    if found is None:
        if how.get("inputs") is None:
            name = how.get("name") or getattr(module, "__name__", type(module).__name__)
            raise ConfigError(
                f"cannot tell what {name} takes as input; pass inputs={INPUTS_IN_WORDS} "
                "(on the command line: --ids, --embeddings or --values)"
            )
        found = Subject(module, inputs=how["inputs"], caching=how.get("caching"))
        if how.get("padding") is None and "run" not in how:
            how["padding"] = _guessed_padding(module)
    return _changed(found, how)


def _changed(subject: Subject, how: dict[str, Any]) -> Subject:
    wanted, padding, of_target = (how.pop(word, None) for word in ("causal", "padding", "target_padding"))
    if wanted is not None and "sees" not in how:
        how["sees"] = causal() if wanted else full()
    if "run" not in how and (padding is not None or of_target is not None):
        how["run"] = direct_run(padding, how.get("caching", subject.caching), of_target)
    how["pads"] = subject.pads or padding is not None
    how["pads_target"] = subject.pads_target or of_target is not None
    return dataclasses.replace(subject, **how)


def _guessed_padding(module: Callable[..., Any]) -> TrueIsReal | TrueIsHidden | None:
    try:
        names = inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters
    except (TypeError, ValueError):
        return None
    return next((padding for padding in _PADDING_NAMES if padding.argument in names), None)
