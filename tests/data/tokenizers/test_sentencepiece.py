"""SentencePiece models, compared with the sentencepiece library."""

from __future__ import annotations

import io
import json

import pytest

from clearhead.data.tokenizers.library import load_hf_tokenizer
from clearhead.errors import DataError, StorageError
from tests.support.tokenizers import TEXTS

KINDS = {
    "unigram": {"model_type": "unigram"},
    "pairs": {"model_type": "bpe"},
    "pairs with bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 330, "pad_id": 3},
    "as it stands": {"model_type": "bpe", "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    "no blank before": {"model_type": "unigram", "add_dummy_prefix": False, "user_defined_symbols": ["<sep>"]},
}
READ = [
    "the quick brown fox",
    "the  lazy   dog ",
    "",
    "dog<sep>fox",
    "ﬁve ① café 漢字 🙂",
    "  The\tDOG\nfox.",
    "x" * 40,
]


@pytest.fixture(params=KINDS)
def reference_and_folder(request, tmp_path):
    """Return SentencePiece's processor and the folder with its model."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece, the reference implementation, is missing")
    model = io.BytesIO()
    options = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **KINDS[request.param]}
    library.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **options)
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return library.SentencePieceProcessor(model_proto=model.getvalue()), tmp_path


def test_encode_and_decode_equal_sentencepiece(reference_and_folder):
    expected, folder = reference_and_folder
    actual = load_hf_tokenizer(folder)
    assert actual.vocab_size == expected.vocab_size()
    for text in [*READ, *TEXTS]:
        ids = actual.encode(text)
        assert ids == expected.encode(text), text
        assert actual.prompt(text) == [expected.bos_id(), *ids]
        if expected.unk_id() not in ids:
            assert actual.decode(ids) == expected.decode(ids)
    assert (actual.bos_id, actual.eos_id) == (expected.bos_id(), expected.eos_id())


def test_marian_vocabulary_is_shared_by_both_languages(reference_and_folder):
    """Marian: pieces of the source, by the numbers of a list that has those of the target as well."""
    expected, folder = reference_and_folder
    pieces = [expected.id_to_piece(i) for i in range(expected.vocab_size())]
    order = {piece: i for i, piece in enumerate(["</s>", *(p for p in reversed(pieces) if p != "</s>"), "▁perro"])}
    (folder / "tokenizer.model").rename(folder / "source.spm")
    (folder / "vocab.json").write_text(json.dumps(order))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    actual = load_hf_tokenizer(folder)
    text = "the quick brown fox"
    assert actual.prompt(text) == [*(order[piece] for piece in expected.encode(text, out_type=str)), order["</s>"]]
    assert actual.decode([order["▁perro"], order["</s>"]]).strip() == "perro"


def test_t5_extra_ids_follow_the_vocabulary(reference_and_folder):
    expected, folder = reference_and_folder
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 3}')
    actual = load_hf_tokenizer(folder)
    assert actual.prompt("dog")[-1] == expected.eos_id()
    assert actual.encode("<extra_id_0>")[-1] == expected.vocab_size() + 2


@pytest.mark.bad_input
def test_read_sentence_pieces_invalid_model_raises(reference_and_folder):
    _, folder = reference_and_folder
    model_bytes = (folder / "tokenizer.model").read_bytes()
    size = len(model_bytes)
    for broken in (model_bytes[: size // 3], b"", b"not a model", model_bytes[: size // 2] + b"\xff" * 9):
        (folder / "tokenizer.model").write_bytes(broken)
        with pytest.raises(StorageError, match="not a complete SentencePiece model"):
            load_hf_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(DataError, match="belongs to a XLMRobertaTokenizer, which is not supported"):
        load_hf_tokenizer(folder)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("vocab.json", "not JSON", "vocab.json is not JSON"),
        ("vocab.json", "[]", "vocab.json contains a list; expected an object"),
        ("vocab.json", '{"a": 1, "b": "c"}', "not a complete SentencePiece model that fits"),
        ("vocab.json", '{"dog": 0}', "not a complete SentencePiece model that fits"),  # no unknown token
        ("tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer", "extra_ids": "x"}', "that fits its tokenizer"),
        ("tokenizer.model", None, "not a complete SentencePiece model"),
    ],
)
def test_sentence_pieces_with_invalid_files_raise_storage_error(reference_and_folder, file, text, message):
    _, folder = reference_and_folder
    # None: a complete model without a piece for unknown text.
    content = b"\x0a\x05\x0a\x03abc" if text is None else text.encode()
    (folder / file).write_bytes(content)
    with pytest.raises(StorageError, match=message):
        load_hf_tokenizer(folder)
