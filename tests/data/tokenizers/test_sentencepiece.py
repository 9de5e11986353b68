"""SentencePiece models give the ids that SentencePiece itself gives."""

from __future__ import annotations

import io
import json

import pytest

from clearhead.data.tokenizers.library import load_hf_tokenizer
from clearhead.errors import DataError, StorageError
from tests.data.tokenizers.test_library import TEXTS

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
def made(request, tmp_path):
    """SentencePiece's own, and the folder with its model."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece, the peer to compare with, is missing")
    model = io.BytesIO()
    how = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **KINDS[request.param]}
    library.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **how)
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return library.SentencePieceProcessor(model_proto=model.getvalue()), tmp_path


def test_ids_and_texts_are_those_of_sentencepiece(made):
    theirs, folder = made
    ours = load_hf_tokenizer(folder)
    assert ours.vocab_size == theirs.vocab_size()
    for text in [*READ, *TEXTS]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.prompt(text) == [theirs.bos_id(), *ids]
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id(), theirs.eos_id())


def test_two_languages_share_one_list(made):
    """Marian: pieces of the source, by the numbers of a list that has those of the target as well."""
    theirs, folder = made
    pieces = [theirs.id_to_piece(i) for i in range(theirs.vocab_size())]
    order = {piece: i for i, piece in enumerate(["</s>", *(p for p in reversed(pieces) if p != "</s>"), "▁perro"])}
    (folder / "tokenizer.model").rename(folder / "source.spm")
    (folder / "vocab.json").write_text(json.dumps(order))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    ours = load_hf_tokenizer(folder)
    text = "the quick brown fox"
    assert ours.prompt(text) == [*(order[piece] for piece in theirs.encode(text, out_type=str)), order["</s>"]]
    assert ours.decode([order["▁perro"], order["</s>"]]).strip() == "perro"


def test_t5_has_tokens_of_its_own_at_the_end(made):
    theirs, folder = made
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 3}')
    ours = load_hf_tokenizer(folder)
    assert ours.prompt("dog")[-1] == theirs.eos_id()
    assert ours.encode("<extra_id_0>")[-1] == theirs.vocab_size() + 2


@pytest.mark.bad_input
def test_what_cannot_be_read_is_refused(made):
    _, folder = made
    whole = (folder / "tokenizer.model").read_bytes()
    for broken in (whole[: len(whole) // 3], b"", b"not a model", whole[: len(whole) // 2] + b"\xff" * 9):
        (folder / "tokenizer.model").write_bytes(broken)
        with pytest.raises(StorageError, match="not a whole SentencePiece model"):
            load_hf_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(DataError, match="of a XLMRobertaTokenizer, whose ids are not known here"):
        load_hf_tokenizer(folder)
