"""A model family: how its configuration is read and written, and its table of tensor names.

Families are defined in `families/`. A family states what every key of a configuration means (`fields` for keys that
rename a field, `converters` for others, `ignored_keys` for keys without effect on outputs), and which stored tensor is
which parameter (`rows`) or none (`ignored_tensors`). Anything else is rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._core.validation import short_repr
from clearhead.config import Config
from clearhead.errors import ClearheadError, StorageError
from clearhead.hub.weight_map import Shape, WeightMap, fits
from clearhead.models.decoder import LOGIT_FIELDS

# Keys of every transformers configuration that change no output of a forward pass: how to train, save, search or name.
_EVERYWHERE = (
    *("_name_or_path", "_attn_implementation*", "architectures", "attn_implementation", "bos_token_id", "dtype"),
    *("eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "output_past", "pad_token_id", "sep_token_id"),
    *("task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache"),
    "auto_map",  # names code to run; this project runs none
    *("compression_config", "quantization_config"),  # not empty: rejected before
    # Of older files, and of what generates and what classifies.
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("early_stopping", "encoder_no_repeat_*", "eos_token_ids", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_*", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam*", "num_labels"),
    *("num_return_sequences", "output_scores", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty"),
    *("return_dict", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "torchscript"),
    *("chunk_size_feed_forward", "tf_legacy_loss", "tokenizer_class", "typical_p", "use_bfloat16"),
)
# Keys of every transformers configuration that change the model, unless they have these values.
_NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
# Keys of a third-party configuration, or fields of a Config, with their values.
KeyValues: TypeAlias = dict[str, Any]
ModelConfig: TypeAlias = Any  # of the class of a family, whose fields its converters know
_REQUIRED = object()
_MAX_REASON = 1_000  # characters of an error that may quote a configuration


class ConfigReader:
    """A third-party configuration that records which keys were read; `reject_unused` raises for the others."""

    def __init__(self, data: Mapping[str, object], shapes: Mapping[str, Shape] | None = None) -> None:
        self.data = dict(data)
        self.shapes = dict(shapes or {})  # of the stored tensors, for configurations that lack some sizes
        self._read_keys: set[str] = set()

    def __call__(self, name: str, default: object = _REQUIRED) -> Any:
        """Return the value of a key, or the default of the original code if it is missing."""
        self._read_keys.add(name)
        if name in self.data:
            return self.data[name]
        if default is _REQUIRED:
            raise StorageError(f"the configuration has no {name!r}, which this family needs")
        return default

    def only(self, name: str, *choices: object, default: object = _REQUIRED) -> Any:
        """Return the value of a key that must be one of `choices`; if missing, `default` or the first."""
        value = self(name, choices[0] if default is _REQUIRED else default)
        if value not in choices:
            expected = " or ".join(repr(item) for item in choices)
            raise StorageError(f"{name} is {short_repr(value)}, which clearhead cannot express; expected {expected}")
        return value

    def expect(self, **values: object) -> None:
        """Raise unless each key is missing or has this value."""
        for name, value in values.items():
            self.only(name, value)

    def reject_unused(self, ignored_keys: Iterable[str]) -> None:
        """Raise for keys that were not read and are not ignored."""
        unused = [key for key in self.data if key not in self._read_keys and not fits(key, ignored_keys)]
        if unused:
            pairs = ", ".join(f"{short_repr(key)}: {short_repr(self.data[key], 40)}" for key in unused[:3])
            raise StorageError(
                f"the configuration has {pairs}, which is not known here and may change what the model computes"
            )


@dataclass(frozen=True)
class Field:
    """A configuration field for a third-party key.

    Args:
        name: Name of the field.
        default: Value that the original code uses if the key is missing.
        load: Converts the value of the key to that of the field.
        export: Converts it back.
        choices: Maps values of the key to those of the field instead; the first of several synonyms is written.
    """

    name: str
    default: Any = _REQUIRED
    load: Callable[[Any], Any] = lambda value: value
    export: Callable[[Any], Any] = lambda value: value
    choices: Mapping[Any, Any] | None = None

    def read(self, keys: ConfigReader, key: str) -> Any:
        """Return the value of the field."""
        if self.choices is not None:
            return self.choices[keys.only(key, *self.choices, default=self.default)]
        return self.load(keys(key, self.default))

    def write(self, value: object) -> Any:
        """Return the value of the key."""
        if self.choices is None:
            return self.export(value)
        choice = next((choice for choice, meaning in self.choices.items() if meaning == value), None)
        if choice is None:
            raise StorageError(f"transformers configurations cannot express {value}")
        return choice


Fields: TypeAlias = dict[str, str | tuple[str, Any] | Field]


@dataclass(frozen=True)
class Converter:
    """Conversions that involve several keys or fields: `read` returns fields from keys, `write` keys from a config."""

    read: Callable[[ConfigReader], KeyValues]
    write: Callable[[ModelConfig], KeyValues] = lambda config: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A third-party format for one kind of model.

    Args:
        name: Name of the family, and the model_type of its configurations.
        architecture: Class that transformers loads an export into, or a function from a configuration to it.
        kind: Type of the configuration.
        fields: Keys that rename a field: `{"n_embd": "d_model", "n_inner": ("d_ff", None)}`, the second with its
            default, or a `Field` if values differ too.
        rows: Weight maps, or a function from a configuration to them.
        required: Keys that are supported for one value each, which is also their default.
        defaults: Fields that no key determines.
        converters: Conversions that involve several keys or fields.
        ignored_keys: Keys without effect on outputs.
        ignored_tensors: Stored tensors that are not parameters.
        heads: Patterns of tensors of heads, and what these are for; a head that is not loaded is named in a warning.
        constants: Stored tensors that are computed: compared when loading, written when exporting.
        copies: Returns stored tensors that repeat others, such as a tied output matrix; compared unless loaded.
        prefix: Prefix of names that models without a head leave out.
        aliases: Older spellings, replaced in this order.
        model_type: The model_type, if it is not `name`, because several families share it.
        matches: Whether a configuration with this model_type is of this family; None for all others.
    """

    name: str
    architecture: str | Callable[[ModelConfig], str]
    kind: type[Config]
    fields: Fields
    rows: tuple[WeightMap, ...] | Callable[[ModelConfig], tuple[WeightMap, ...]]
    required: KeyValues = dataclasses.field(default_factory=dict)
    defaults: KeyValues = dataclasses.field(default_factory=dict)
    converters: tuple[Converter, ...] = ()
    ignored_keys: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Callable[[ModelConfig, torch.dtype], dict[str, Tensor]] = lambda config, dtype: {}
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    model_type: str = ""
    matches: Callable[[ConfigReader], bool] | None = None

    @property
    def key(self) -> str:
        """The `model_type` of configurations."""
        return self.model_type or self.name

    @cached_property
    def _fields(self) -> dict[str, Field]:
        fields = {key: (field,) if isinstance(field, str) else field for key, field in self.fields.items()}
        return {key: field if isinstance(field, Field) else Field(*field) for key, field in fields.items()}

    def _table(self, config: Config) -> tuple[WeightMap, ...]:
        return self.rows(config) if callable(self.rows) else self.rows

    def config(self, keys: ConfigReader) -> Config:
        """Return the configuration; every key is used, ignored or rejected."""
        try:
            fields = self.defaults | {field.name: field.read(keys, key) for key, field in self._fields.items()}
            keys.expect(
                **{
                    key: value
                    for key, value in _NEUTRAL.items()
                    if key not in self.required and not fits(key, self.ignored_keys)
                }
            )
            keys.expect(**self.required)
            for part in self.converters:
                fields |= part.read(keys)
            keys.reject_unused((*_EVERYWHERE, *self.ignored_keys))
            if fields.get("lm_head") is False:
                fields = {name: value for name, value in fields.items() if name not in LOGIT_FIELDS}
            return self.kind(**fields)
        except ClearheadError as error:
            raise StorageError(f"a {self.name} configuration: {str(error)[:_MAX_REASON]}") from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise StorageError(
                f"a {self.name} configuration cannot be read: {type(error).__name__}: {str(error)[:_MAX_REASON]}"
            ) from error

    def keys(self, config: Config) -> KeyValues:
        """Return the third-party configuration, with explicit sizes."""
        config = with_explicit_sizes(config)
        architecture = self.architecture(config) if callable(self.architecture) else self.architecture
        keys: KeyValues = {"model_type": self.key, "architectures": [architecture]}
        keys |= {key: field.write(getattr(config, field.name)) for key, field in self._fields.items()} | self.required
        for part in self.converters:
            keys |= part.write(config)
        return keys

    def unsupported_reason(self, config: Config) -> str | None:
        """Return why this family cannot express a configuration, or None if its keys read back as the same."""
        if type(config) is not self.kind:
            return f"{self.name} is a {self.kind.__name__}, and the model is a {type(config).__name__}"
        expected = canonical(config)
        try:
            with torch.device("meta"):
                names = [name for name, _ in config.build().named_parameters()]
            stored = {name: () for weight_map in self.resolve(config, names) for name in weight_map.source}
            actual = canonical(self.config(ConfigReader(self.keys(config), stored)))
        except ClearheadError as error:
            return str(error)
        for field in dataclasses.fields(expected):
            value, read_back = getattr(expected, field.name), getattr(actual, field.name)
            if value != read_back:
                return f"{field.name} is {value!s}, which can only be expressed as {read_back!s}"
        return None

    def normalize_names(self, names: Iterable[str], config: Config) -> dict[str, str]:
        """Map the table's names to stored names, which may use aliases or lack the prefix."""
        rows = self._table(config)
        stored_names = {}
        for stored in names:
            name = stored
            for old, new in self.aliases:
                name = name.replace(old, new)
            is_known = fits(name, (*self.ignored_tensors, *self.heads))
            is_in_table = is_known or any(row.match(name, is_source=True) for row in rows)
            stored_names[name if is_in_table else self.prefix + name] = stored
        return stored_names

    def resolve(self, config: Config, names: Iterable[str]) -> list[WeightMap]:
        """Return the weight maps that load the parameters of these names, each by one map."""
        rows = self._table(config)
        weight_maps = {}
        for name in names:
            weight_map = next((match for row in rows if (match := row.match(name, is_source=False))), None)
            if weight_map is None:
                raise StorageError(f"there is no tensor for {name}")
            weight_maps[weight_map.source] = weight_map
        return list(weight_maps.values())


def join_reasons(reasons: Mapping[str, str], most: int = 3) -> str:
    """Return the reasons against families in one line; families with the same reason share it."""
    families: dict[str, list[str]] = {}
    for family, reason in reasons.items():
        families.setdefault(reason, []).append(family)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in families.items()]
    n_others = len(lines) - most
    return "; ".join([*lines[:most], *([f"and {n_others} other reasons"] if n_others > 0 else [])])


def with_explicit_sizes(config: ModelConfig) -> ModelConfig:
    """Return a configuration with explicit values for sizes that default to others."""
    if not hasattr(config, "ff_width"):
        return config
    sizes = {"d_ff": config.ff_width, "n_kv_heads": config.kv_heads, "d_head": config.head_width}
    return config.replace(**{name: size for name, size in sizes.items() if getattr(config, name, 0) is None})


def canonical(config: Config) -> Config:
    """Return a configuration with explicit sizes and without training options, for comparison."""
    config = with_explicit_sizes(config)
    changes: KeyValues = {"bias": config.biases} if hasattr(config, "biases") else {}
    nested = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    changes |= {name: canonical(value) for name, value in nested if isinstance(value, Config)}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    training = ("dropout", "attention_dropout", "feed_forward_dropout", "init")
    changes |= {name: defaults[name] for name in training if name in defaults}
    return config.replace(**changes)
