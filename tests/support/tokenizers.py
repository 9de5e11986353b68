"""Small tokenizers of the `tokenizers` library, as folders on the hub contain them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.third_party_models import PEERS

TEXTS = ["the quick brown fox", "the lazy dog, the quick dog", "unaffable and quick"]


def word_piece():
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    inner.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special))
    ends = [(name, inner.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return inner, {"pad_token": "[PAD]"}


def unigram():
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    inner.train_from_iterator(TEXTS, trainer)
    end = [("</s>", inner.token_to_id("</s>"))]
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=end)
    return inner, {"eos_token": "</s>", "pad_token": {"content": "<pad>", "lstrip": False}}


def byte_pairs():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    inner.train_from_iterator(TEXTS, trainer)
    return inner, {"bos_token": "<|end|>", "eos_token": "<|end|>"}


def save_text_encoder(folder: Path) -> Path:
    """Save a tiny BERT with a tokenizer, as sentence-transformers would lay it out."""
    inner, specials = word_piece()
    peer = PEERS["bert"]
    peer = replace(peer, sizes=peer.sizes | {"vocab_size": inner.get_vocab_size()})
    peer.save(peer.build(), folder)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    return folder


def save_chat_model(folder: Path) -> Path:
    """Save a tiny Llama with a tokenizer that transformers can load; it has no chat template yet."""
    inner, specials = byte_pairs()
    peer = PEERS["llama"]
    sizes = peer.sizes | {"vocab_size": inner.get_vocab_size(), "max_position_embeddings": 500}
    peer = replace(peer, sizes=sizes)
    peer.save(peer.build(), folder)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
