"""What a foreign model reads and writes: its maker's tokenizer, the ids that begin and end a text, and its limits."""

from __future__ import annotations

from typing import Any

from clearhead.data.pieces import HFTokenizer
from clearhead.data.tokenizers import FILE_NAME
from clearhead.disk import read_json
from clearhead.errors import ConfigError, StorageError
from clearhead.generation import LogitsProcessors
from clearhead.interop.source import CONFIG, GENERATION, Source
from clearhead.values import shown

# What stands beside the weights and is text: the tokenizer in all its forms, and the settings of generation.
_COMPANIONS = (
    *(FILE_NAME, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "chat_template.jinja", "preprocessor_config.json"),
)


def companions(source: Source) -> dict[str, str]:
    """The files beside the weights, by name, as their maker wrote them."""
    found = {name: source.path / name for name in _COMPANIONS if (source.path / name).is_file()}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"a file beside the weights in {source.path} is not text: {error}") from error


def tokenizer_of(source: Source) -> HFTokenizer:
    """The tokenizer that came with a model; one that has ids beyond the model's vocabulary is refused."""
    pieces = source.tokenizer()
    half = source.config.get("text_config")  # of CLIP
    size = (half if isinstance(half, dict) else source.config).get("vocab_size")
    if isinstance(size, int) and pieces.vocab_size > size:
        raise StorageError(
            f"the tokenizer in {source.path} has ids up to {pieces.vocab_size - 1} and the model's vocabulary ends at "
            f"{size - 1}: the two do not belong together"
        )
    return pieces


def stops_of(source: Source) -> tuple[int, ...]:
    """The ids that end a text: as the settings of generation say, or the configuration, or none."""
    return _ids(source, "eos_token_id")


def start_of(source: Source) -> tuple[int, ...]:
    """The ids that an encoder-decoder writes after."""
    return _ids(source, "decoder_start_token_id") or _ids(source, "bos_token_id")


# Limits by their keys in generation_config.json; keys that ask for what is not done here, with what asks for nothing.
_LIMITS = {
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
_MORE = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
}


def limits_of(source: Source) -> LogitsProcessors | None:
    """What a model may write, as its settings of generation say; None where they say nothing."""
    found = {key: value for key, value in source.generation().items() if value is not None}
    for key, nothing in _MORE.items():
        if found.get(key, nothing) != nothing:
            raise StorageError(
                f"{source.path} asks for {key} {shown(found[key], 40)} in generation, which is not done here"
            )
    given = {field: found[key] for key, field in _LIMITS.items() if key in found}
    runs = ("forced_eos_token_ids", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
    given |= {field: _as_ids(given[field]) for field in runs if field in given}
    if "bad_words_ids" in given:  # a stop is no word
        given["bad_words_ids"] = tuple(
            run for run in given["bad_words_ids"] if run not in {(id_,) for id_ in stops_of(source)}
        )
    try:
        limits = LogitsProcessors(**given)
    except (ConfigError, TypeError) as error:
        raise StorageError(f"the settings of generation in {source.path} cannot be read: {error}") from error
    return None if limits == LogitsProcessors() else limits


def _as_ids(found: Any) -> Any:
    """An id or a list of them as a tuple, lists inside as well; anything else is left to be refused."""
    if isinstance(found, list):
        return tuple(_as_ids(item) if isinstance(item, list) else item for item in found)
    return (found,) if type(found) is int else found


def _ids(source: Source, key: str) -> tuple[int, ...]:
    found = source.generation().get(key)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(id_) is int for id_ in ids):
        raise StorageError(f"{source.path}: {key} is {shown(found)}; expected an id, or a list of them")
    return tuple(ids)


def pooling_of(source: Source) -> dict[str, Any]:
    """How sentence-transformers makes one vector of a text, where a folder says so: `first` (token, else the mean),
    `unit` (length), `max_len` (tokens, of which later ones are left out)."""
    path = source.path
    modules = path / "modules.json"
    parts: list[Any] = read_json(modules, list) if modules.is_file() else []
    if not all(isinstance(part, dict) for part in parts):
        raise StorageError(f"{modules} is no list of objects")
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in parts]
    if strange := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise StorageError(f"{modules} has a {strange[0]}, which is not known here")
    pooling = read_json(path / "1_Pooling" / CONFIG) if "Pooling" in kinds else {}
    modes = [mode for mode, chosen in pooling.items() if mode.startswith("pooling_mode_") and chosen is True]
    if modes not in ([], ["pooling_mode_cls_token"], ["pooling_mode_mean_tokens"]):
        raise StorageError(f"{path / '1_Pooling'} asks for {modes}; expected the mean of tokens, or the first")
    limits = path / "sentence_bert_config.json"
    return {
        "first": modes == ["pooling_mode_cls_token"],
        "unit": "Normalize" in kinds,
        "max_len": read_json(limits).get("max_seq_length") if limits.is_file() else None,
    }
