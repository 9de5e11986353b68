"""Tokenizers: exact round trips, labels, storage, and errors."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.data.tokenizers import base
from clearhead.data.tokenizers.base import CharTokenizer, WordLevelTokenizer, load_tokenizer
from clearhead.data.tokenizers.library import ByteLevelBPE, train_bpe
from clearhead.errors import ConfigError, DataError, StorageError

TEXTS = [
    "The cat sat on the mat.",
    "The dog sat on the log, and the cat saw the dog.",
    "¿Dónde está el gato? El gato está en la casa.",
    "Mañana, el perro y el gato estarán en casa.",
] * 5


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 307)


@given(st.text())
@example("<pad> <bos><eos>")
@example(" \n\t  two  spaces\r\n")
@example("日本語 😀 e\u0301 \x00 \u2028")
def test_bpe_round_trip_preserves_any_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert not {bpe.pad_id, bpe.bos_id, bpe.eos_id} & set(ids)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda bpe: pickle.loads(pickle.dumps(bpe))])
def test_bpe_copy_encodes_special_names_as_text(bpe, twin):
    text = "a <pad> is no <bos>padding<eos>"
    assert twin(bpe).encode(text) == bpe.encode(text)
    assert twin(bpe).decode(bpe.encode(text)) == text


@given(st.text(alphabet="a \n'.tsé1", max_size=40))
def test_encode_long_equals_encode(bpe, text):
    assert bpe.encode_long(text).tolist() == bpe.encode(text)


def test_train_bpe_merges_frequent_pairs(bpe):
    assert bpe.vocab_size == 307
    assert len(bpe.encode("The cat")) < len("The cat")
    assert bpe.encode_batch(TEXTS[:3]) == [bpe.encode(text) for text in TEXTS[:3]]


@pytest.mark.bad_input
@pytest.mark.parametrize("source", ["corpus.txt", "the cat sat on the mat"])
def test_train_bpe_on_a_str_raises_data_error(source):
    with pytest.raises(DataError, match=r"expected a list of texts, or a Path of a file"):
        train_bpe(source, 307)


def test_train_bpe_is_deterministic_and_reads_files(bpe, tmp_path):
    assert train_bpe(iter(TEXTS), 307).to_json() == bpe.to_json()
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    assert train_bpe(path, 307).to_json() == bpe.to_json()
    assert train_bpe([path], 307).to_json() == bpe.to_json()


@given(st.text(alphabet=st.characters(blacklist_categories=["C", "Z"])))
def test_tokens_joined_are_the_text(bpe, text):
    text = text + " cat " + text
    ids = bpe.encode(text)
    pieces = bpe.tokens(ids)
    assert len(pieces) == len(ids)
    assert "Ġ" not in "".join(pieces) or "Ġ" in text
    if not any(piece.startswith("<") for piece in pieces) and "␣" not in "".join(pieces):
        assert "".join(pieces) == text


def test_tokens_are_readable(bpe):
    ids = [bpe.bos_id, *bpe.encode("the cat\n"), bpe.eos_id]
    assert bpe.tokens(ids) == ["<bos>", "the", " cat", "⏎", "<eos>"]
    assert bpe.tokens(torch.tensor(ids)) == bpe.tokens(ids)
    assert bpe.decode(torch.tensor(ids)) == "the cat\n"
    # A character that the training texts lack is written as its bytes.
    assert bpe.tokens(bpe.encode("😀")) == ["<F0>", "<9F>", "<98>", "<80>"]
    assert base.display_token("  ") == "␣␣"
    assert base.display_token("\x07\t") == "\\x07⇥"


def test_train_bpe_special_tokens_come_first():
    t = train_bpe(TEXTS, 300, ["<sep>"])
    assert (t.pad_id, t.bos_id, t.eos_id) == (0, 1, 2)
    assert t.tokens([3]) == ["<sep>"]
    assert t.decode([3, *t.encode("a")]) == "a"


def test_bpe_invalid_arguments_raise(bpe):
    with pytest.raises(ConfigError, match="258 is too small: 3 special tokens and 256 bytes need 259"):
        train_bpe(TEXTS, 258)
    with pytest.raises(ConfigError, match="each must be there once"):
        train_bpe(TEXTS, 300, ["<pad>"])
    with pytest.raises(DataError, match="id 307 is outside the vocabulary: expected 0 to 306"):
        bpe.decode([307])
    with pytest.raises(DataError, match="text 0 contains half a surrogate pair at character 1"):
        bpe.encode("a\ud800")


@pytest.mark.bad_input
@pytest.mark.parametrize("way", ["encode", "encode_long"])
def test_encode_non_text_raises_data_error(bpe, way):
    for tokenizer in (bpe, CharTokenizer("abc"), WordLevelTokenizer(["a", "<pad>", "<bos>", "<eos>"])):
        for wrong in (3, None, b"a", ["a"]):
            with pytest.raises(DataError, match=f"this is a {type(wrong).__name__}"):
                getattr(tokenizer, way)(wrong)


@given(st.text(alphabet="abc\n😀é "))
def test_char_tokenizer_round_trip(text):
    t = CharTokenizer("abc\n😀é ")
    assert t.decode([t.bos_id, *t.encode(text), t.eos_id, t.pad_id]) == text
    # Independent of the look-up table: the place in the alphabet.
    assert t.encode(text) == [3 + "abc\n😀é ".index(c) for c in text]
    assert t.encode_long(text).tolist() == t.encode(text)


def test_char_tokenizer_unknown_character_raises_or_is_replaced():
    t = CharTokenizer.of("banana")
    assert (t.alphabet, t.vocab_size) == ("abn", 6)
    with pytest.raises(DataError, match=r"'x' \(number 2 of the text\) is not in the alphabet of 3"):
        t.encode("anx")
    t = CharTokenizer.of("banana", unknown=True)
    ids = t.encode("anx\ud800")
    assert t.tokens(ids) == ["a", "n", "<unk>", "<unk>"]
    assert t.decode(ids) == "an\ufffd\ufffd"
    assert t.encode("") == []
    with pytest.raises(ConfigError, match="each character once"):
        CharTokenizer("aba")


def test_word_level_tokenizer_encodes_words_of_the_vocabulary():
    t = WordLevelTokenizer(["A", "D", "<PAD>", "<START>", "<STOP>"], pad="<PAD>", bos="<START>", eos="<STOP>")
    ids = t.encode("D A A <START> A D <STOP>")
    assert ids == [1, 0, 0, 3, 0, 1, 4]
    assert t.tokens(ids) == ["D", "A", "A", "<START>", "A", "D", "<STOP>"]
    assert t.decode(ids) == "D A A A D"
    with pytest.raises(DataError, match="symbol 'B' is not in the vocabulary: expected blanks between A D"):
        t.encode("A B")
    with pytest.raises(ConfigError, match="each symbol once"):
        WordLevelTokenizer(["A", "A", "<pad>", "<bos>", "<eos>"])
    with pytest.raises(ConfigError, match="expected three different symbols of the list"):
        WordLevelTokenizer(["A", "<pad>", "<bos>"])
    with pytest.raises(ConfigError, match="no blanks"):
        WordLevelTokenizer(["A B", "<pad>", "<bos>", "<eos>"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train_bpe(TEXTS, 307), "The cat sat. ¿Mañana? 😀 <pad>"),
        (lambda: CharTokenizer.of("aé\n😀", unknown=True), "é😀x"),
        (lambda: WordLevelTokenizer(["<pad>", "<bos>", "<eos>", "Ä", '"']), 'Ä " Ä'),
    ],
)
def test_save_and_load_round_trip(tmp_path, make, text):
    t = make()
    path = t.save(tmp_path / "run")
    for place in (tmp_path / "run", path):
        again = load_tokenizer(place)
        assert type(again) is type(t)
        assert again.encode(text) == t.encode(text)
        assert (again.vocab_size, again.pad_id, again.bos_id, again.eos_id) == (
            t.vocab_size,
            t.pad_id,
            t.bos_id,
            t.eos_id,
        )
        assert again.to_json() == t.to_json()


def _without_specials(tmp_path):
    fields = json.loads(train_bpe(TEXTS, 300).to_json())
    fields["added_tokens"] = []
    del fields["model"]["vocab"]["<pad>"]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "JSONDecodeError"),
        ("[1]", "its content is a list, expected an object"),
        ("{}", "expected byte-level BPE, characters or symbols"),
        ('{"type": "characters", "alphabet": 3, "unknown": true}', "expected byte-level BPE"),
        (
            '{"type": "symbols", "symbols": ["a"], "pad": "p", "bos": "b", "eos": "e"}',
            "three different symbols",
        ),
        (
            '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}',
            "not a tokenizer of this project",
        ),
        ('{"model": {"type": "WordPiece"}, "pre_tokenizer": null}', "expected byte-level BPE"),
        (_without_specials, "this tokenizer has no <pad>"),
        ("[" * 100_000, "not a tokenizer of this project"),
    ],
)
def test_load_tokenizer_invalid_file_raises_storage_error(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else content(tmp_path), encoding="utf-8")
    with pytest.raises(StorageError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_load_tokenizer_missing_file_raises_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"there is no .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokenizer_is_abstract():
    assert issubclass(ByteLevelBPE, base.Tokenizer)
    with pytest.raises(TypeError, match="abstract"):
        base.Tokenizer()
