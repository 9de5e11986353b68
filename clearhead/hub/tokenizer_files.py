"""Tokenizer, special ids and generation settings of third-party checkpoints."""

from __future__ import annotations

from typing import Any

from clearhead._core.atomic_io import read_json
from clearhead._core.validation import short_repr
from clearhead.data.tokenizers.base import FILE_NAME
from clearhead.data.tokenizers.library import HFTokenizer
from clearhead.errors import ConfigError, StorageError
from clearhead.generation import LogitsProcessors
from clearhead.hub.formats import CONFIG, GENERATION, CheckpointReader

# Text files next to the parameters: tokenizer files and generation settings.
COMPANIONS = (
    *(FILE_NAME, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "chat_template.jinja", "preprocessor_config.json"),
)


def tokenizer_files(source: CheckpointReader) -> dict[str, str]:
    """Return the text files of a checkpoint by name: tokenizer files and generation settings."""
    paths = {name: source.path / name for name in COMPANIONS if (source.path / name).is_file()}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"a tokenizer or settings file in {source.path} is not UTF-8: {error}") from error


def load_tokenizer(source: CheckpointReader) -> HFTokenizer:
    """Return the tokenizer of a checkpoint; raise if it has ids outside the model's vocabulary."""
    tokenizer = source.tokenizer()
    text_config = source.config.get("text_config")  # of CLIP
    size = (text_config if isinstance(text_config, dict) else source.config).get("vocab_size")
    if isinstance(size, int) and tokenizer.vocab_size > size:
        raise StorageError(
            f"the tokenizer in {source.path} has ids up to {tokenizer.vocab_size - 1} and the model's vocabulary ends "
            f"at {size - 1}: they do not match"
        )
    return tokenizer


def eos_ids(source: CheckpointReader) -> tuple[int, ...]:
    """Return the ids that end a text, from the generation settings or the configuration."""
    return _ids(source, "eos_token_id")


def decoder_start_ids(source: CheckpointReader) -> tuple[int, ...]:
    """Return the ids that an encoder-decoder generates after."""
    return _ids(source, "decoder_start_token_id") or _ids(source, "bos_token_id")


# Fields of LogitsProcessors by their keys in generation_config.json; unsupported keys with their neutral values.
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
}
_UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
}


def generation_constraints(source: CheckpointReader) -> LogitsProcessors | None:
    """Return the logits processors of the generation settings; None if there are none."""
    settings = {key: value for key, value in source.generation().items() if value is not None}
    for key, neutral in _UNSUPPORTED.items():
        if settings.get(key, neutral) != neutral:
            raise StorageError(
                f"{source.path} requires {key} {short_repr(settings[key], 40)} in generation, which is not supported"
            )
    options = {field: settings[key] for key, field in _PROCESSORS.items() if key in settings}
    runs = ("forced_eos_token_ids", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
    options |= {field: _as_ids(options[field]) for field in runs if field in options}
    if "bad_words_ids" in options:  # a stop id is not a bad word
        options["bad_words_ids"] = tuple(
            run for run in options["bad_words_ids"] if run not in {(id_,) for id_ in eos_ids(source)}
        )
    try:
        processors = LogitsProcessors(**options)
    except (ConfigError, TypeError) as error:
        raise StorageError(f"invalid generation settings in {source.path}: {error}") from error
    return None if processors == LogitsProcessors() else processors


def _as_ids(value: Any) -> Any:
    """Convert an id or nested lists of ids to tuples; leave anything else for validation."""
    if isinstance(value, list):
        return tuple(_as_ids(item) if isinstance(item, list) else item for item in value)
    return (value,) if type(value) is int else value


def _ids(source: CheckpointReader, key: str) -> tuple[int, ...]:
    """Return the ids of a generation setting."""
    value = source.generation().get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
        raise StorageError(f"{source.path}: {key} is {short_repr(value)}; expected an id, or a list of them")
    return tuple(ids)


def pooling_mode(source: CheckpointReader) -> dict[str, Any]:
    """Return how sentence-transformers pools token vectors: `first` token or mean, `unit` norm, and `max_len`."""
    path = source.path
    modules = path / "modules.json"
    parts: list[Any] = read_json(modules, list) if modules.is_file() else []
    if not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{modules} is not a list of objects")
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in parts]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise StorageError(f"{modules} has a {unknown[0]}, which is not supported")
    pooling = read_json(path / "1_Pooling" / CONFIG) if "Pooling" in kinds else {}
    modes = [mode for mode, enabled in pooling.items() if mode.startswith("pooling_mode_") and enabled is True]
    if modes not in ([], ["pooling_mode_cls_token"], ["pooling_mode_mean_tokens"]):
        raise StorageError(f"{path / '1_Pooling'} has {modes}; expected the mean of tokens, or the first")
    limits = path / "sentence_bert_config.json"
    return {
        "first": modes == ["pooling_mode_cls_token"],
        "unit": "Normalize" in kinds,
        "max_len": read_json(limits).get("max_seq_length") if limits.is_file() else None,
    }
