"""Folders without tokenizer.json: WordPiece and byte-level BPE from the files of transformers' slow tokenizers."""

from __future__ import annotations

import json

import pytest

from clearhead.data.tokenizers.library import load_hf_tokenizer
from clearhead.errors import DataError, StorageError

transformers = pytest.importorskip("transformers", reason="transformers, the reference to compare with, is missing")

TEXTS = ["The quick brown fox", "jumps, over the lazy dog!", "  Éclair unknown-word 中文 ", "", "[MASK] fox<mask>"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "jump", "##s", ",", "!", "over"]
PIECES += ["lazy", "dog", "e", "##cl", "##air", "-", "word", "The", "##E", "É", "中"]


def write_word_piece(folder, **settings):
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_bpe(folder, model_type, specials):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=specials, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    inner.model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def assert_equal_to_transformers(folder, reference):
    tokenizer = load_hf_tokenizer(folder)
    for text in TEXTS:
        expected = reference(text)["input_ids"]
        assert tokenizer.prompt(text) == expected, text
        plain = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == plain
        assert tokenizer.decode(plain) == reference.decode(
            plain, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"strip_accents": False}], ids=str)
def test_word_piece_equals_transformers(tmp_path, settings):
    write_word_piece(tmp_path, **settings)
    reference = transformers.BertTokenizerFast.from_pretrained(tmp_path, **settings)
    assert_equal_to_transformers(tmp_path, reference)


def test_byte_level_bpe_of_gpt2_equals_transformers(tmp_path):
    write_bpe(tmp_path, "gpt2", ["<|endoftext|>"])
    assert_equal_to_transformers(tmp_path, transformers.GPT2TokenizerFast.from_pretrained(tmp_path))
    assert load_hf_tokenizer(tmp_path).eos_id == 0


@pytest.mark.parametrize("name", ["roberta", "bart"])
def test_byte_level_bpe_of_roberta_and_bart_equals_transformers(tmp_path, name):
    write_bpe(tmp_path, name, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    assert_equal_to_transformers(tmp_path, transformers.RobertaTokenizerFast.from_pretrained(tmp_path))
    tokenizer = load_hf_tokenizer(tmp_path)
    assert tokenizer.pad_id == 1
    # As in the tokenizer.json of roberta-base, the mask token takes the space before it.
    assert tokenizer.encode("a <mask>") == tokenizer.encode("a<mask>")


@pytest.mark.bad_input
def test_other_tokenizer_classes_are_rejected_by_name(tmp_path):
    write_bpe(tmp_path, "clip", ["<|endoftext|>"])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizerFast"}')
    with pytest.raises(DataError, match="CLIPTokenizer, which is not supported without"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.bad_input
def test_invalid_vocabulary_raises_one_sentence(tmp_path):
    write_word_piece(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(StorageError, match="invalid vocabulary"):
        load_hf_tokenizer(tmp_path)
