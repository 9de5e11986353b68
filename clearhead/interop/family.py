"""What a family of models is to this room: how its configuration is read and written, and its table of names.

A family stands in `families/`, beside its kin. It says what every key of a configuration means (`fields` for keys that
are a field of ours under another name, `parts` for the others, `harmless` for those that change no number) and which
stored tensor is which weight (`rows`), or is no weight (`ignored`). What nobody mentions is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.errors import ClearheadError, StorageError
from clearhead.interop.table import Row, Shape, fits
from clearhead.values import shown

# Keys of every transformers configuration that change no output of a forward pass: how to train, save, search or name.
_EVERYWHERE = (
    *("_name_or_path", "_attn_implementation*", "architectures", "attn_implementation", "bos_token_id", "dtype"),
    *("eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "output_past", "pad_token_id", "sep_token_id"),
    *("task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache"),
    "auto_map",  # names code to run; this project runs none
    # Of older files, and of what generates and what classifies.
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_*", "eos_token_ids", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_*", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam*", "num_labels"),
    *("num_return_sequences", "output_scores", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty"),
    *("return_dict", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "torchscript"),
    *("typical_p", "use_bfloat16"),
)
_REQUIRED = object()
_MAX_REASON = 1_000  # characters of an error that may quote a configuration


class Keys:
    """A configuration as its maker wrote it. What is asked for is ticked off; `refuse_rest` names the others."""

    def __init__(self, data: Mapping[str, Any], shapes: Mapping[str, Shape] | None = None) -> None:
        self.data = dict(data)
        self.shapes = dict(shapes or {})  # of the stored tensors, for a maker whose configuration does not say all
        self._seen: set[str] = set()

    def __call__(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key, or what its maker's code takes where the key is left out."""
        self._seen.add(name)
        if name in self.data:
            return self.data[name]
        if default is _REQUIRED:
            raise StorageError(f"the configuration has no {name!r}, which this family needs")
        return default

    def only(self, name: str, *known: Any, default: Any = _REQUIRED) -> Any:
        """The value of a key that is understood for some values only; left out, it is `default` (or the first)."""
        value = self(name, known[0] if default is _REQUIRED else default)
        if value not in known:
            expected = " or ".join(repr(item) for item in known)
            raise StorageError(f"{name} is {shown(value)}, which clearhead cannot express; expected {expected}")
        return value

    def expect(self, **values: Any) -> None:
        """Keys that are understood for one value each, which is also what leaving them out means."""
        for name, value in values.items():
            self.only(name, value)

    def refuse_rest(self, harmless: Iterable[str]) -> None:
        """Raise for the first keys that were not asked for and are not harmless."""
        rest = [key for key in self.data if key not in self._seen and not fits(key, harmless)]
        if rest:
            pairs = ", ".join(f"{shown(key)}: {shown(self.data[key], 40)}" for key in rest[:3])
            raise StorageError(
                f"the configuration has {pairs}, which is not known here and may change what the model computes"
            )


@dataclass(frozen=True)
class Field:
    """A field of ours that has a key of theirs; `default` is what its maker's code takes where the key is left out.

    Values differ too where theirs is one of some `words` (of those that mean the same the first is written), or where
    one is made `into` ours and `back`."""

    name: str
    default: Any = _REQUIRED
    into: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] = lambda value: value
    words: Mapping[Any, Any] | None = None

    def read(self, keys: Keys, key: str) -> Any:
        if self.words is not None:
            return self.words[keys.only(key, *self.words, default=self.default)]
        return self.into(keys(key, self.default))

    def write(self, value: Any) -> Any:
        if self.words is None:
            return self.back(value)
        found = next((word for word, meaning in self.words.items() if meaning == value), None)
        if found is None:
            raise StorageError(f"there is no word for {value} in a transformers configuration")
        return found


Fields: TypeAlias = dict[str, str | tuple[str, Any] | Field]


@dataclass(frozen=True)
class Part:
    """What keys and fields do not say one by one: fields of ours that are read from keys, and how a configuration of
    ours is written as those keys."""

    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One maker's way to write one kind of model.

    `fields` are keys that are our fields under another name: `{"n_embd": "d_model", "n_inner": ("d_ff", None)}`, the
    second with what is meant where the key is left out, or a `Field` where values differ too. `fixed` are keys that are
    understood for one value each, which leaving them out means too, and `always` fields of ours that no key says.
    `parts` say the rest, both ways. `rows` is the table of names, spelt as the maker exports them, or gives it for a
    configuration; `prefix` is what its models without a head leave out, and `aliases` are older spellings, replaced in
    this order. `constants` are tensors that are stored and yet no weights: what is read is compared with them, and they
    are written again."""

    name: str  # model_type
    architecture: str  # the class that transformers loads an export into
    kind: type[Config]
    fields: Fields
    rows: tuple[Row, ...] | Callable[[Any], tuple[Row, ...]]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    always: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    harmless: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    constants: Callable[[Any, torch.dtype], dict[str, Tensor]] = lambda config, dtype: {}
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _fields(self) -> dict[str, Field]:
        given = {key: (field,) if isinstance(field, str) else field for key, field in self.fields.items()}
        return {key: field if isinstance(field, Field) else Field(*field) for key, field in given.items()}

    def _table(self, config: Config) -> tuple[Row, ...]:
        return self.rows(config) if callable(self.rows) else self.rows

    def config(self, keys: Keys) -> Config:
        """Our configuration for theirs; every key is used, harmless, or refused."""
        try:
            fields = self.always | {field.name: field.read(keys, key) for key, field in self._fields.items()}
            keys.expect(pruned_heads={}, **self.fixed)
            for part in self.parts:
                fields |= part.read(keys)
            keys.refuse_rest((*_EVERYWHERE, *self.harmless))
            return self.kind(**fields)
        except ClearheadError as error:
            raise StorageError(f"a {self.name} configuration: {str(error)[:_MAX_REASON]}") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StorageError(
                f"a {self.name} configuration cannot be read: {type(error).__name__}: {str(error)[:_MAX_REASON]}"
            ) from error

    def keys(self, config: Config) -> dict[str, Any]:
        """Their configuration for ours, whose own defaults are written out first."""
        config = spelt_out(config)
        written: dict[str, Any] = {"model_type": self.name, "architectures": [self.architecture]}
        written |= {key: field.write(getattr(config, field.name)) for key, field in self._fields.items()} | self.fixed
        for part in self.parts:
            written |= part.write(config)
        return written

    def why_not(self, config: Config) -> str | None:
        """Why this family cannot hold a model of ours, in words; None if it can: its keys then read back as this."""
        if type(config) is not self.kind:
            return f"{self.name} is a {self.kind.__name__}, and this is a {type(config).__name__}"
        wanted = settled(config)
        try:
            with torch.device("meta"):
                ours = [name for name, _ in config.build().named_parameters()]
            stored = {name: () for move in self.moves(config, ours) for name in move.theirs}
            got = settled(self.config(Keys(self.keys(config), stored)))
        except ClearheadError as error:
            return str(error)
        for field in dataclasses.fields(wanted):
            ours, theirs = getattr(wanted, field.name), getattr(got, field.name)
            if ours != theirs:
                return f"{field.name} is {ours!s}, which {self.name} can only write as {theirs!s}"
        return None

    def spelt(self, names: Iterable[str], config: Config) -> dict[str, str]:
        """Stored names by the table's spelling: without older words, with the prefix that a bare model leaves out."""
        rows, found = self._table(config), {}
        for stored in names:
            name = stored
            for old, new in self.aliases:
                name = name.replace(old, new)
            known = fits(name, self.ignored) or any(row.move(name, theirs=True) for row in rows)
            found[name if known else self.prefix + name] = stored
        return found

    def moves(self, config: Config, names: Iterable[str]) -> list[Row]:
        """The rows that make our tensors of these names; each tensor is made by one row."""
        rows, made = self._table(config), {}
        for name in names:
            move = next((move for row in rows if (move := row.move(name, theirs=False))), None)
            if move is None:
                raise StorageError(f"the table of {self.name} has no row for our {name}")
            made[move.theirs] = move
        return list(made.values())


def spelt_out(config: Any) -> Any:
    """A configuration with the sizes written out that it leaves to those of others."""
    if not hasattr(config, "ff_width"):
        return config
    sizes = {"d_ff": config.ff_width, "n_kv_heads": config.kv_heads, "d_head": config.head_width}
    return config.replace(**{name: size for name, size in sizes.items() if getattr(config, name, 0) is None})


def settled(config: Config) -> Config:
    """A configuration that is spelt out, without what matters in training alone, to compare by."""
    config = spelt_out(config)
    changes: dict[str, Any] = {"bias": config.biases} if hasattr(config, "biases") else {}
    halves = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    changes |= {name: settled(half) for name, half in halves if isinstance(half, Config)}
    plain = {field.name: field.default for field in dataclasses.fields(config)}
    training = ("dropout", "attention_dropout", "feed_forward_dropout", "init")
    changes |= {name: plain[name] for name in training if name in plain}
    return config.replace(**changes)
