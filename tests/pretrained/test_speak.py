"""Strings in, strings and numbers out, for models in the box, exported ones and foreign ones."""

from __future__ import annotations

import json

import pytest
import torch

from clearhead import generation, pretrained
from clearhead.errors import DataError, StorageError
from clearhead.generation import Sample
from clearhead.masks import padding
from tests.data.test_pieces import word_piece
from tests.interop.peers import PEERS

TEXT = "ROMEO:\nWhat light"


@pytest.fixture(scope="module")
def bard():
    return pretrained.load("shakespeare")


def test_a_decoder_goes_on_from_a_text(bard):
    ids = bard.tokenizer.encode(TEXT)
    made = generation.generate(bard.model, torch.tensor([ids]), max_new=20, stop=bard.stops).sequence(0)
    text = bard.generate(TEXT, max_new=20)
    assert text == bard.tokenizer.decode(made)
    assert len(text) > 5
    assert bard.generate([TEXT, "JULIET:"], max_new=20)[0] == text
    assert "".join(bard.stream(TEXT, max_new=20)) == text
    assert bard.generate([]) == []
    sampled = bard.generate(TEXT, max_new=20, how=Sample(seed=3))
    assert sampled == bard.generate(TEXT, max_new=20, how=Sample(seed=3))


def test_what_was_exported_says_the_same(bard, tmp_path):
    pretrained.export(bard, tmp_path / "out")
    again = pretrained.load(tmp_path / "out")
    assert again.task == "text"
    assert again.generate(TEXT, max_new=20) == bard.generate(TEXT, max_new=20)


@pytest.fixture
def reader(tmp_path):
    """A tiny BERT with a tokenizer, as sentence-transformers would lay it out."""
    inner, specials = word_piece()
    peer = PEERS["bert"]
    from dataclasses import replace

    peer = replace(peer, sizes=peer.sizes | {"vocab_size": inner.get_vocab_size()})
    peer.save(peer.build(), tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    return tmp_path


TEXTS = ["the quick brown fox", "dog", "the lazy dog the"]


def test_an_encoder_gives_a_vector_for_each_text(reader):
    trained = pretrained.load(reader, dtype=torch.float64)
    got = trained.embed(TEXTS, batch=2)
    for text, vector in zip(TEXTS, got, strict=True):
        ids = torch.tensor([trained.tokenizer.prompt(text)[: trained.model.config.max_len]])
        alone = trained.model(ids)[0].mean(0)
        torch.testing.assert_close(vector, alone.float())
        torch.testing.assert_close(trained.embed(text), alone.float())


def test_a_folder_says_how_a_vector_is_made(reader):
    kinds = ["models.Transformer", "models.Pooling", "models.Normalize"]
    modules = [{"idx": i, "type": f"sentence_transformers.{kind}"} for i, kind in enumerate(kinds)]
    (reader / "modules.json").write_text(json.dumps(modules))
    (reader / "1_Pooling").mkdir()
    (reader / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (reader / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    trained = pretrained.load(reader)
    got = trained.embed(TEXTS[0])
    ids = trained.tokenizer.prompt(TEXTS[0], 4)
    first = trained.model(torch.tensor([ids]), mask=padding(torch.tensor([4])))[0, 0]
    torch.testing.assert_close(got, first / first.norm(), rtol=1e-5, atol=1e-6)
    (reader / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(StorageError, match="pooling_mode_max_tokens"):
        pretrained.load(reader).embed("dog")


@pytest.mark.bad_input
def test_what_cannot_be_said_is_refused(bard, reader):
    with pytest.raises(DataError, match="prompt is empty"):
        bard.generate("")
    with pytest.raises(DataError, match="reads at most"):
        bard.generate("x" * 400)
    with pytest.raises(DataError, match="expected an Encoder"):
        bard.embed("x")
    with pytest.raises(DataError, match="was trained for vectors"):
        pretrained.load(reader).generate("x")


@pytest.mark.bad_input
def test_a_tokenizer_that_does_not_fit_its_model_is_refused(reader):
    config = json.loads((reader / "config.json").read_text())
    inner, _ = word_piece()
    inner.add_tokens(["one-more-token"])
    inner.save(str(reader / "tokenizer.json"))
    with pytest.raises(StorageError, match=f"vocabulary ends at {config['vocab_size'] - 1}: the two do not belong"):
        pretrained.load(reader)
