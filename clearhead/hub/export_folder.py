"""`export`: write a model as a Hugging Face folder, with its tokenizer and generation settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core.keywords import explain_keywords
from clearhead.data.tokenizers.base import (
    BOS,
    EOS,
    PAD,
    TOKENIZERS_MISSING,
    UNK,
    CharTokenizer,
    Tokenizer,
    WordLevelTokenizer,
)
from clearhead.data.tokenizers.library import ByteLevelBPE, HFTokenizer
from clearhead.errors import DataError, optional_dependency
from clearhead.generation import BeamSearch
from clearhead.hub import convert, tokenizer_files
from clearhead.models import EncoderDecoder

if TYPE_CHECKING:
    from clearhead.hub.pipelines import Pipeline

_ROLES = ("bos_token", "eos_token", "pad_token")


@explain_keywords
def export(pipeline: Pipeline, folder: str | Path, *, family: str | None = None) -> str:
    """Export a model with its tokenizer to a new folder that transformers loads.

    Args:
        pipeline: The model.
        folder: A folder that does not exist or is empty.
        family: Name of the family; by default the one that the model was loaded as, or else the first that can express
            it.

    Returns:
        The name of the family.

    Raises:
        StorageError: If the folder is not empty, or no family can express the model.
    """
    files = _text_files(pipeline)
    source_keys = {} if pipeline.source is None else dict(pipeline.source.config)
    source_keys |= json.loads(files.get("generation_config.json", "{}"))
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
    keys: dict[str, Any] = {name: source_keys[name] for name in names if name in source_keys}
    preferred = None if pipeline.source is None else convert.detect_family(pipeline.source).name
    return convert.export_third_party(
        pipeline.model, folder, family=family, preferred=preferred, keys=keys, files=files
    ).name


def _text_files(pipeline: Pipeline) -> dict[str, str]:
    """Return tokenizer and settings files by name: those of a third-party folder unchanged, else converted."""
    if pipeline.source is not None and pipeline.source.path.is_dir():
        files = tokenizer_files.tokenizer_files(pipeline.source)
        if "tokenizer.json" not in files and pipeline.source_tokenizer is not None:
            files["tokenizer.json"] = pipeline.source_tokenizer.to_json()
        return files
    try:
        tokenizer = pipeline.tokenizer
    except DataError:
        return {}  # not a model of text
    settings = pipeline.generation_settings
    max_len = getattr(pipeline.model.config, "max_len", None)
    tokenizer_config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len}
    if isinstance(tokenizer, HFTokenizer):  # of a .gguf file
        tokenizer_config |= tokenizer.specials
        ids = {role: tokenizer.encode(token)[-1] for role, token in tokenizer.specials.items()}
    else:
        ids = {"pad_token": tokenizer.pad_id, "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokenizer_config |= dict(zip(ids, tokenizer.tokens(list(ids.values())), strict=True))
    generation_config: dict[str, object] = {f"{role}_id": id_ for role, id_ in ids.items() if role in _ROLES}
    generation_config["eos_token_id"] = settings.stop_ids[0] if len(settings.stop_ids) == 1 else settings.stop_ids
    if isinstance(pipeline.model, EncoderDecoder):
        (generation_config["decoder_start_token_id"],) = settings.decoder_start_ids
    if isinstance(settings.strategy, BeamSearch):
        generation_config["num_beams"] = settings.strategy.width
        generation_config["length_penalty"] = settings.strategy.length_penalty
        generation_config["early_stopping"] = settings.strategy.early_stopping
    files = {
        "tokenizer.json": tokenizer_json(tokenizer, ends_with_eos=pipeline.task == "translation"),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation_config, indent=2) + "\n",
    }
    template = None if pipeline.source is None else pipeline.source.template()
    return files if template is None else {**files, "chat_template.jinja": template}


def tokenizer_json(tokenizer: Tokenizer, *, ends_with_eos: bool = False) -> str:
    """Return a tokenizer as JSON of the `tokenizers` library, with the same ids and the same decoded text.

    Args:
        tokenizer: The tokenizer.
        ends_with_eos: Whether the id that ends a text is added, as the encoder of a translator expects.
    """
    with optional_dependency(TOKENIZERS_MISSING):
        from tokenizers import Regex, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.to_json()
    special: list[str] = []
    if isinstance(tokenizer, ByteLevelBPE):
        inner: Any = Inner.from_str(tokenizer.to_json())
    elif isinstance(tokenizer, CharTokenizer):
        unknown = [UNK] if tokenizer.unknown else []
        special = [PAD, BOS, EOS, *unknown]
        vocabulary = {token: id_ for id_, token in enumerate([*special, *tokenizer.alphabet])}
        inner = Inner(models.WordLevel(vocabulary, *unknown))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
    elif isinstance(tokenizer, WordLevelTokenizer):
        special = list(tokenizer.special)
        inner = Inner(models.WordLevel({symbol: id_ for id_, symbol in enumerate(tokenizer.symbols)}))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise DataError(
            f"a {type(tokenizer).__name__} tokenizer cannot be exported; expected characters, symbols, byte-level BPE "
            "or a Hugging Face tokenizer"
        )
    inner.add_special_tokens(special)
    if ends_with_eos:
        (eos,) = tokenizer.tokens([tokenizer.eos_id])
        inner.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_id)]
        )
    return str(inner.to_str())
