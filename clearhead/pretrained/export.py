"""A model of any name as a Hugging Face folder, with its tokenizer and the settings of generation beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clearhead import interop
from clearhead.data.pieces import BytePairs, Pieces
from clearhead.data.tokenizers import BOS, EOS, PAD, UNK, Characters, Symbols, Tokenizer
from clearhead.errors import DataError
from clearhead.pretrained.store import Trained


def export(trained: Trained, folder: str | Path, *, family: str | None = None) -> str:
    """Write a model into a new folder, from which transformers loads it, and say as which family."""
    files = _texts(trained)
    known = {} if trained.source is None else dict(trained.source.config)
    known |= json.loads(files.get("generation_config.json", "{}"))
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
    keys: dict[str, Any] = {key: known[key] for key in kept if key in known}
    return interop.export(trained.model, folder, family=family, keys=keys, files=files).name


def _texts(trained: Trained) -> dict[str, str]:
    """The files beside the weights: as they came, for a model from elsewhere, else made from our tokenizer."""
    if trained.source is not None and trained.source.path.is_dir():
        return interop.companions(trained.source)
    try:
        tokenizer = trained.tokenizer
    except DataError:
        return {}  # it reads no text
    roles = {"pad_token": tokenizer.pad_id, "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = dict(zip(roles, tokenizer.tokens(list(roles.values())), strict=True))
    longest = getattr(trained.model.config, "max_len", None)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **names}
    settings = {f"{role}_id": number for role, number in roles.items()}
    return {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(about, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(settings, indent=2) + "\n",
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """A tokenizer of ours in the form of the `tokenizers` library, which gives the same ids and the same text back."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, BytePairs | Pieces):
        return tokenizer.to_json()
    if isinstance(tokenizer, Characters):
        special, unknown = [PAD, BOS, EOS], [UNK] if tokenizer.unknown else []
        special += unknown
        words = {word: number for number, word in enumerate([*special, *tokenizer.alphabet])}
        inner: Any = Inner(models.WordLevel(words, *unknown))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
    elif isinstance(tokenizer, Symbols):
        special = list(tokenizer.special)
        inner = Inner(models.WordLevel({word: number for number, word in enumerate(tokenizer.symbols)}))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise DataError(f"a {type(tokenizer).__name__} tokenizer has no form that transformers reads")
    inner.add_special_tokens(special)
    return inner.to_str()
