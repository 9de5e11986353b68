"""Tokenizer files and pooling of third-party checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead._core.atomic_io import read_json
from clearhead.data.tokenizers.base import FILE_NAME
from clearhead.data.tokenizers.library import HFTokenizer
from clearhead.errors import StorageError
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


@dataclass(frozen=True)
class Pooling:
    """How sentence-transformers makes a vector of a text.

    Attributes:
        first: Whether it is the vector of the first token instead of the mean.
        unit: Whether it is divided by its norm.
        max_len: Largest number of tokens, or None for that of the model.
    """

    first: bool = False
    unit: bool = False
    max_len: int | None = None


def pooling_mode(source: CheckpointReader) -> Pooling:
    """Return how the vectors of tokens are pooled."""
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
    max_len = read_json(limits).get("max_seq_length") if limits.is_file() else None
    return Pooling(first=modes == ["pooling_mode_cls_token"], unit="Normalize" in kinds, max_len=max_len)
