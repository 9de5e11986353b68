"""What a foreign model reads and writes: its maker's tokenizer, and the ids that end a text."""

from __future__ import annotations

from typing import Any

from clearhead.data.pieces import Pieces, load_pieces
from clearhead.data.tokenizers import FILE_NAME
from clearhead.errors import DataError, StorageError
from clearhead.interop.source import Source, read_json

__all__ = ["companions", "stops_of", "tokenizer_of"]

_GENERATION = "generation_config.json"
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
    _GENERATION,
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
    if not (source.path / FILE_NAME).is_file():
        raise DataError(f"{source.path} has no {FILE_NAME}: copy the one that its model was trained with there")
    pieces = load_pieces(source.path)
    size = source.config.get("vocab_size")
    if isinstance(size, int) and pieces.vocab_size > size:
        raise StorageError(
            f"{source.path / FILE_NAME} has ids up to {pieces.vocab_size - 1} and the model's vocabulary ends at "
            f"{size - 1}: the two do not belong together"
        )
    return pieces


def stops_of(source: Source) -> tuple[int, ...]:
    """The ids that end a text: as the settings of generation say, or the configuration, or none."""
    path = source.path / _GENERATION
    settings: dict[str, Any] = read_json(path) if path.is_file() else {}
    found = settings.get("eos_token_id", source.config.get("eos_token_id"))
    stops = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(stop) is int for stop in stops):
        raise StorageError(f"{path.parent}: eos_token_id is {found!r}; expected an id, or a list of them")
    return tuple(stops)
