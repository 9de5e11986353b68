"""Build tokenizers from the files of folders without tokenizer.json: vocab.txt, or vocab.json with merges.txt.

They are those of transformers' slow tokenizers. Which tokenizer a folder has is stated by `tokenizer_class` in its
tokenizer_config.json, or follows from `model_type` in its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core.atomic_io import read_json
from clearhead.data.tokenizers.base import TOKENIZERS_MISSING
from clearhead.errors import DataError, StorageError, optional_dependency

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

WORD_PIECE_FILE = "vocab.txt"
BPE_FILES = ("vocab.json", "merges.txt")
_WORD_PIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer")
# Classes of byte-level BPE, and whether a text is framed by <s> and </s>.
_BPE_CLASSES = {"GPT2Tokenizer": False, "RobertaTokenizer": True, "BartTokenizer": True, "LongformerTokenizer": True}
_CLASS_OF_MODEL = {
    "albert": "AlbertTokenizer",
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "gpt2": "GPT2Tokenizer",
    "llama": "LlamaTokenizer",
    "marian": "MarianTokenizer",
    "mistral": "LlamaTokenizer",
    "roberta": "RobertaTokenizer",
    "t5": "T5Tokenizer",
}


def tokenizer_class(folder: Path) -> str | None:
    """Return the name of a folder's tokenizer class without "Fast", or None if its files do not state it."""
    name = read_object(folder / "tokenizer_config.json").get("tokenizer_class")
    if name is None:
        name = _CLASS_OF_MODEL.get(str(read_object(folder / "config.json").get("model_type")))
    return None if name is None else str(name).removesuffix("Fast")


def has_vocabulary_files(folder: Path) -> bool:
    """Return whether a folder has the files that `read_vocabulary_files` reads."""
    return (folder / WORD_PIECE_FILE).is_file() or all((folder / name).is_file() for name in BPE_FILES)


def read_vocabulary_files(folder: Path) -> tuple[LibraryTokenizer, dict[str, str]]:
    """Return a tokenizer of the `tokenizers` library, and its special tokens by role.

    Raises:
        DataError: The class of the tokenizer is not supported.
        StorageError: A file is not a vocabulary.
    """
    kind = tokenizer_class(folder)
    is_word_piece = (folder / WORD_PIECE_FILE).is_file()
    expected = _WORD_PIECE_CLASSES if is_word_piece else tuple(_BPE_CLASSES)
    if kind is None:
        kind = expected[0]
    if kind not in expected:
        raise DataError(
            f"{folder} has the vocabulary of a {kind}, which is not supported without tokenizer.json; expected "
            f"{', '.join(expected)}"
        )
    try:
        return _word_piece(folder) if is_word_piece else _byte_level_bpe(folder, framed=_BPE_CLASSES[kind])
    except StorageError:
        raise
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise StorageError(f"{folder} has an invalid vocabulary: {error}") from error


def _word_piece(folder: Path) -> tuple[LibraryTokenizer, dict[str, str]]:
    """Return BERT's WordPiece from vocab.txt, whose line numbers are the ids."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    settings = read_object(folder / "tokenizer_config.json")
    lines = (folder / WORD_PIECE_FILE).read_text(encoding="utf-8").split("\n")
    vocabulary = {token.rstrip("\r"): i for i, token in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    roles = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    roles |= {"mask_token": "[MASK]"}
    names = roles | _named_tokens(settings, roles)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    first, last = names["cls_token"], names["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    tokenizer.add_special_tokens([token for token in names.values() if token in vocabulary])
    return tokenizer, names


def _byte_level_bpe(folder: Path, *, framed: bool) -> tuple[LibraryTokenizer, dict[str, str]]:
    """Return the byte-level BPE of GPT-2, or of RoBERTa and BART if `framed`, from vocab.json and merges.txt."""
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    settings = read_object(folder / "tokenizer_config.json")
    adds_space = bool(settings.get("add_prefix_space", False))
    tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in BPE_FILES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    if framed:
        roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        roles |= {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
    names = roles | _named_tokens(settings, roles)
    ids = {name: tokenizer.token_to_id(name) for name in names.values()}
    # The mask token takes the space before it, so that "a <mask>" has no token for the space.
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False, lstrip=name == names.get("mask_token"))
            for name, id_ in ids.items()
            if id_ is not None
        ]
    )
    if framed:
        end, start = names["sep_token"], names["cls_token"]
        end_id, start_id = ids[end], ids[start]
        if end_id is None or start_id is None:
            raise StorageError(f"{folder} names {end} and {start} as special tokens, but its vocabulary lacks them")
        tokenizer.post_processor = processors.RobertaProcessing(
            (end, end_id), (start, start_id), trim_offsets=True, add_prefix_space=adds_space
        )
    return tokenizer, names


def _named_tokens(settings: Mapping[str, Any], roles: dict[str, str]) -> dict[str, str]:
    """Return the special tokens that the settings name."""
    names = {}
    for role in roles:
        token = settings.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            names[role] = text
    return names


def read_object(path: Path) -> Any:
    """Return the object of a JSON file; empty if there is none."""
    return read_json(path) if path.is_file() else {}
