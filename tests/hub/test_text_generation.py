"""Strings in, strings and numbers out, for models in the box, exported ones and foreign ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from clearhead import generation, hub
from clearhead.errors import DataError, ShapeError, StorageError
from clearhead.generation import Greedy, Sample
from clearhead.masks import padding
from tests.data.tokenizers.test_library import word_piece
from tests.support.third_party_models import PEERS

TEXT = "ROMEO:\nWhat light"


@pytest.fixture(scope="module")
def bard():
    return hub.pipeline("shakespeare")


def test_a_decoder_goes_on_from_a_text(bard):
    ids = bard.tokenizer.encode(TEXT)
    made = generation.generate(bard.model, torch.tensor([ids]), max_new_tokens=20, stop_ids=bard.stop_ids).sequence(0)
    text = bard.generate(TEXT, max_new_tokens=20)
    assert text == bard.tokenizer.decode(made)
    assert len(text) > 5
    assert bard.generate([TEXT, "JULIET:"], max_new_tokens=20)[0] == text
    assert "".join(bard.stream(TEXT, max_new_tokens=20)) == text
    assert bard.generate([]) == []
    sampled = bard.generate(TEXT, max_new_tokens=20, strategy=Sample(seed=3))
    assert sampled == bard.generate(TEXT, max_new_tokens=20, strategy=Sample(seed=3))


def test_what_was_exported_says_the_same(bard, tmp_path):
    hub.export(bard, tmp_path / "out")
    again = hub.pipeline(tmp_path / "out")
    assert again.task == "text"
    assert again.generate(TEXT, max_new_tokens=20) == bard.generate(TEXT, max_new_tokens=20)


@pytest.fixture
def reader(tmp_path):
    """A tiny BERT with a tokenizer, as sentence-transformers would lay it out."""
    inner, specials = word_piece()
    peer = PEERS["bert"]
    peer = replace(peer, sizes=peer.sizes | {"vocab_size": inner.get_vocab_size()})
    peer.save(peer.build(), tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    return tmp_path


TEXTS = ["the quick brown fox", "dog", "the lazy dog the"]


def test_an_encoder_gives_a_vector_for_each_text(reader):
    trained = hub.pipeline(reader, dtype=torch.float64)
    got = trained.embed(TEXTS, batch_size=2)
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
    trained = hub.pipeline(reader)
    got = trained.embed(TEXTS[0])
    ids = trained.tokenizer.prompt(TEXTS[0], 4)
    first = trained.model(torch.tensor([ids]), mask=padding(torch.tensor([4])))[0, 0]
    torch.testing.assert_close(got, first / first.norm(), rtol=1e-5, atol=1e-6)
    (reader / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(StorageError, match="pooling_mode_max_tokens"):
        hub.pipeline(reader).embed("dog")


def test_a_text_is_put_into_a_class(reader, tmp_path):
    transformers = pytest.importorskip("transformers")
    names = {0: "calm", 1: "angry", 2: "glad"}
    config = transformers.BertConfig.from_pretrained(reader, id2label=names, label2id={v: k for k, v in names.items()})
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(reader)
    trained = hub.pipeline(reader)
    got = trained.classify(TEXTS, batch_size=2)
    for text, found in zip(TEXTS, got, strict=True):
        ids = torch.tensor([trained.tokenizer.prompt(text, 13)])
        wanted = theirs(ids).logits.softmax(-1)[0].tolist()
        assert found == pytest.approx({names[i]: wanted[i] for i in range(3)}, abs=1e-5)
        assert list(found.values()) == sorted(wanted, reverse=True) or max(wanted) - min(wanted) < 1e-5
        assert trained.classify(text) == pytest.approx(found, abs=1e-6)
    hub.export(trained, tmp_path / "out")
    for again, before in zip(hub.pipeline(tmp_path / "out").classify(TEXTS, batch_size=2), got, strict=True):
        assert again == pytest.approx(before, abs=1e-6)
    file = reader / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"problem_type": "multi_label_classification"}))
    several = hub.pipeline(reader).classify(TEXTS[0])
    logits = theirs(torch.tensor([trained.tokenizer.prompt(TEXTS[0], 13)])).logits[0].sigmoid().tolist()
    assert several == pytest.approx({names[i]: logits[i] for i in range(3)}, abs=1e-5)


def test_an_encoder_decoder_writes_what_its_maker_would(tmp_path):
    """With the ids that its folder says it begins, ends and is limited by."""
    inner, specials = word_piece()
    peer = replace(PEERS["bart"], sizes=PEERS["bart"].sizes | {"vocab_size": inner.get_vocab_size()})
    torch.manual_seed(4)
    theirs = peer.build()
    theirs.generation_config.no_repeat_ngram_size = 2
    theirs.generation_config.min_new_tokens = 5
    theirs.generation_config.max_length = None
    peer.save(theirs, tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    trained = hub.pipeline(tmp_path, dtype=torch.float64)
    got = trained.translate(TEXTS, strategy=Greedy(), max_new_tokens=7)
    for text, found in zip(TEXTS, got, strict=True):
        made = theirs.generate(torch.tensor([trained.tokenizer.prompt(text)]), max_new_tokens=7, do_sample=False)
        assert found == trained.tokenizer.decode(made[0, 1:].tolist()).strip()
        assert found == trained.generate(text, max_new_tokens=7)
    assert len(set(got)) > 1


def test_a_picture_is_put_into_a_class(tmp_path):
    theirs, folder = PEERS["vit"].build(), tmp_path / "vit"
    PEERS["vit"].save(theirs, folder)
    pictures = PEERS["vit"].inputs()
    wanted = theirs(pictures).logits.softmax(-1)[0].tolist()
    got = hub.pipeline(folder, dtype=torch.float64).classify(pictures)[0]
    assert got == pytest.approx({f"LABEL_{i}": wanted[i] for i in range(5)}, abs=1e-6)


@pytest.mark.bad_input
def test_what_cannot_be_said_is_refused(bard, reader):
    with pytest.raises(DataError, match="prompt is empty"):
        bard.generate("")
    with pytest.raises(DataError, match="the context of"):
        bard.generate("x" * 400)
    with pytest.raises(DataError, match="expected an Encoder"):
        bard.embed("x")
    with pytest.raises(ShapeError, match="knows no classes"):
        hub.pipeline(reader).classify("dog")
    with pytest.raises(DataError, match="was trained for vectors"):
        hub.pipeline(reader).generate("x")


@pytest.mark.bad_input
def test_a_tokenizer_that_does_not_fit_its_model_is_refused(reader):
    config = json.loads((reader / "config.json").read_text())
    inner, _ = word_piece()
    inner.add_tokens(["one-more-token"])
    inner.save(str(reader / "tokenizer.json"))
    with pytest.raises(StorageError, match=f"vocabulary ends at {config['vocab_size'] - 1}: they do not match"):
        hub.pipeline(reader)
