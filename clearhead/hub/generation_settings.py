"""Generation settings of a checkpoint: generation_config.json, every key of which is used, ignored or rejected.

They apply where the caller gives no strategy or no `max_new_tokens`, as in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from clearhead._core.validation import check_int, short_repr
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.generation import (
    DEFAULT_MAX_NEW_TOKENS,
    BeamSearch,
    Greedy,
    LogitsProcessors,
    Sample,
    Strategy,
)
from clearhead.hub.formats import GENERATION, CheckpointReader
from clearhead.hub.weight_map import fits

Settings: TypeAlias = Mapping[str, object]

# Fields of LogitsProcessors by their keys.
_PROCESSORS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "min_length": "min_length",
    "min_new_tokens": "min_new_tokens",
    "forced_bos_token_id": "forced_bos_token_id",
    "forced_eos_token_id": "forced_eos_token_ids",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "renormalize_logits": "renormalize_logits",
}
_IDS = ("forced_eos_token_ids", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
_STRATEGY = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("num_beams", "length_penalty", "early_stopping"),
)
_LENGTHS = ("max_length", "max_new_tokens")
_SPECIAL_IDS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
# Keys that are supported for one value each, which has no effect.
_NEUTRAL: Settings = {
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
}
# The same, of sampling.
_NEUTRAL_IN_SAMPLING: Settings = {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "typical_p": 1.0}
# Keys without effect on the ids: caches, outputs, and how several tokens are computed at once.
_IGNORED = (
    *("_commit_hash", "_from_model_config", "transformers_version", "compile_config", "disable_compile", "low_memory"),
    *("cache_config", "cache_implementation", "continuous_batching_config", "max_cache_len", "use_cache"),
    *("output_*", "return_dict_in_generate", "prefill_chunk_size", "assistant_*", "is_assistant", "num_assistant_*"),
    *("max_matching_ngram_size", "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),
)
# Keys of Whisper, which `transcribe` uses or replaces by its own rules.
_WHISPER = (
    *("alignment_heads", "forced_decoder_ids", "is_multilingual", "lang_to_id", "language", "median_filter_width"),
    *("max_initial_timestamp_index", "no_timestamps_token_id", "prev_sot_token_id", "return_timestamps", "task"),
    *("task_to_id", "compression_ratio_threshold", "condition_on_prev_tokens", "logprob_threshold", "use_scan"),
    "no_speech_threshold",
)
_TOP_K = 50  # of transformers, if sampling states none


@dataclass(frozen=True)
class GenerationSettings:
    """How a model generates unless the caller decides otherwise.

    Attributes:
        strategy: Decoding strategy.
        max_new_tokens: Largest number of new tokens, or None.
        max_length: Largest number of tokens with the prompt (for an encoder-decoder, with the start ids), or None.
        stop_ids: Ids that end a text.
        decoder_start_ids: Ids that an encoder-decoder generates after.
        logits_processors: Logits processors, or None.
    """

    strategy: Strategy = Greedy()
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop_ids: tuple[int, ...] = ()
    decoder_start_ids: tuple[int, ...] = ()
    logits_processors: LogitsProcessors | None = None

    def new_tokens(self, prompt_length: int, requested: int | None, default: int = DEFAULT_MAX_NEW_TOKENS) -> int:
        """Return the largest number of new tokens after a prompt: as requested, as set, or the default.

        Raises:
            ConfigError: If the requested number is invalid.
            DataError: If the prompt reaches `max_length`, and no number is requested.
        """
        if requested is not None:
            return check_int(requested, "max_new_tokens", minimum=1)
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return default
        if self.max_length <= prompt_length:
            raise DataError(
                f"the prompt has {prompt_length:,} tokens and the model's own max_length is {self.max_length:,}; give "
                "max_new_tokens"
            )
        return self.max_length - prompt_length

    def updated(self, options: Settings) -> GenerationSettings:
        """Return these settings with those of `options`, such as num_beams and max_length, in their place."""
        current: dict[str, object] = {}
        if isinstance(self.strategy, BeamSearch):
            current = {"num_beams": self.strategy.width, "length_penalty": self.strategy.length_penalty}
            current["early_stopping"] = self.strategy.early_stopping
        try:
            processors = _logits_processors(options, self.stop_ids)
            return dataclasses.replace(
                self,
                strategy=_strategy({**current, **options}),
                max_new_tokens=_length(options, "max_new_tokens") or self.max_new_tokens,
                max_length=_length(options, "max_length") or self.max_length,
                logits_processors=processors or self.logits_processors,
            )
        except (ConfigError, TypeError) as error:
            raise StorageError(f"invalid settings of a task: {error}") from error


def read_generation_settings(source: CheckpointReader) -> GenerationSettings:
    """Return the generation settings of a checkpoint.

    Raises:
        StorageError: If a value is invalid, or a key is unknown or not supported.
    """
    settings = {key: value for key, value in source.generation().items() if value is not None}
    if (source.path / GENERATION).is_file():  # without it the settings are those of config.json
        is_whisper = source.config.get("model_type") == "whisper"
        supported = (*_PROCESSORS, *_STRATEGY, *_LENGTHS, *_SPECIAL_IDS, *_NEUTRAL, *_NEUTRAL_IN_SAMPLING, *_IGNORED)
        unknown = [key for key in settings if not fits(key, (*supported, *(_WHISPER if is_whisper else ())))]
        if unknown:
            raise StorageError(
                f"{source.path / GENERATION} has {short_repr(unknown[0])}: {short_repr(settings[unknown[0]], 40)}, "
                "which is not known here and may change what is generated"
            )
    neutral = {**_NEUTRAL, **(_NEUTRAL_IN_SAMPLING if settings.get("do_sample") else {})}
    for key, value in neutral.items():
        if settings.get(key, value) != value:
            raise StorageError(
                f"{source.path} requires {key} {short_repr(settings[key], 40)} in generation, which is not supported"
            )
    eos_ids = read_ids(source, "eos_token_id")
    try:
        return GenerationSettings(
            strategy=_strategy(settings),
            max_new_tokens=_length(settings, "max_new_tokens"),
            max_length=_length(settings, "max_length"),
            stop_ids=eos_ids,
            decoder_start_ids=read_ids(source, "decoder_start_token_id") or read_ids(source, "bos_token_id"),
            logits_processors=_logits_processors(settings, eos_ids),
        )
    except (ConfigError, TypeError) as error:
        raise StorageError(f"invalid generation settings in {source.path}: {error}") from error


def _strategy(settings: Settings) -> Strategy:
    """Return the decoding strategy."""
    width = settings.get("num_beams", 1)
    if settings.get("do_sample", False):
        if width != 1:
            raise ConfigError(f"num_beams is {short_repr(width)} and do_sample is True, which is not supported")
        values = {key: settings[key] for key in ("temperature", "top_p", "min_p") if key in settings}
        top_k = settings.get("top_k", _TOP_K)
        return Sample(**values, top_k=top_k or None)  # type: ignore[arg-type]  # validated by Sample
    if width == 1:
        return Greedy()
    values = {key: settings[key] for key in ("length_penalty", "early_stopping") if key in settings}
    return BeamSearch(width, **values)  # type: ignore[arg-type]  # validated by BeamSearch


def _length(settings: Settings, key: str) -> int | None:
    """Return a largest length."""
    value = settings.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{key} is {short_repr(value)}; expected a whole number of at least 1")
    return value


def _logits_processors(settings: Settings, eos_ids: tuple[int, ...]) -> LogitsProcessors | None:
    """Return the logits processors, or None if there are none."""
    options = {field: settings[key] for key, field in _PROCESSORS.items() if key in settings}
    options |= {field: _as_tuples(options[field]) for field in _IDS if field in options}
    if options.get("min_new_tokens") is not None:
        options.pop("min_length", None)  # as in transformers, one replaces the other
    bad_words = options.get("bad_words_ids")
    if isinstance(bad_words, tuple):  # a stop id is not a bad word
        options["bad_words_ids"] = tuple(run for run in bad_words if run not in {(id_,) for id_ in eos_ids})
    processors = LogitsProcessors(**options)  # type: ignore[arg-type]  # validated by LogitsProcessors
    return None if processors == LogitsProcessors() else processors


def _as_tuples(value: object) -> object:
    """Convert an id or nested lists of ids to tuples; leave anything else for validation."""
    if isinstance(value, list):
        return tuple(_as_tuples(item) if isinstance(item, list) else item for item in value)
    return (value,) if type(value) is int else value


def read_ids(source: CheckpointReader, key: str) -> tuple[int, ...]:
    """Return the ids of a generation setting."""
    value = source.generation().get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
        raise StorageError(f"{source.path}: {key} is {short_repr(value)}; expected an id, or a list of them")
    return tuple(ids)
