"""Small tokenizers of the `tokenizers` library, as folders on the hub contain them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

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
