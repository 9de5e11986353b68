"""What a foreign model reads and writes: its maker's tokenizer, and the ids that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clearhead.data.pieces import Pieces
from clearhead.data.tokenizers import FILE_NAME
from clearhead.errors import StorageError
from clearhead.interop.source import CONFIG, GENERATION, Source, read_json

__all__ = ["companions", "pooling_of", "stops_of", "tokenizer_of"]

# What stands beside the weights and is text: the tokenizer in all its forms, and the settings of generation.
_COMPANIONS = (
    FILE_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    GENERATION,
)


def companions(source: Source) -> dict[str, str]:
    """The files beside the weights, by name, as their maker wrote them."""
    found = {name: source.path / name for name in _COMPANIONS if (source.path / name).is_file()}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"a file beside the weights in {source.path} is not text: {error}") from error


def tokenizer_of(source: Source) -> Pieces:
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
    found = source.generation().get("eos_token_id")
    stops = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(stop) is int for stop in stops):
        raise StorageError(f"{source.path}: eos_token_id is {found!r}; expected an id, or a list of them")
    return tuple(stops)


def pooling_of(source: Source) -> dict[str, Any]:
    """How sentence-transformers makes one vector of a text, where a folder says so: `first` (token, else the mean),
    `unit` (length), `max_len` (tokens, of which later ones are left out)."""
    path = source.path
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in _list(path / "modules.json")]
    if strange := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise StorageError(f"{path / 'modules.json'} has a {strange[0]}, which is not known here")
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


def _list(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise StorageError(f"{path} is no list of objects")
    return data
