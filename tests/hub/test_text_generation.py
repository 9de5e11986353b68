"""Text generation, embedding and classification with bundled, exported and third-party models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead import analysis, generation, hub
from clearhead.errors import ConfigError, DataError, DtypeError, ShapeError, StorageError
from clearhead.generation import Greedy, Sample
from clearhead.masks import causal, padding
from tests.support.third_party_models import PEERS
from tests.support.tokenizers import save_text_encoder, word_piece

TEXT = "ROMEO:\nWhat light"


@pytest.fixture(scope="module")
def bard():
    return hub.pipeline("shakespeare")


def test_generate_continues_a_text(bard):
    ids = bard.tokenizer.encode(TEXT)
    ids = generation.generate(bard.model, torch.tensor([ids]), max_new_tokens=20, stop_ids=bard.stop_ids).sequence(0)
    text = bard.generate(TEXT, max_new_tokens=20)
    assert text == bard.tokenizer.decode(ids)
    assert len(text) > 5
    assert bard.generate([TEXT, "JULIET:"], max_new_tokens=20)[0] == text
    assert "".join(bard.stream(TEXT, max_new_tokens=20)) == text
    assert bard.generate([]) == []
    sampled = bard.generate(TEXT, max_new_tokens=20, strategy=Sample(seed=3))
    assert sampled == bard.generate(TEXT, max_new_tokens=20, strategy=Sample(seed=3))


def test_exported_model_generates_the_same_text(bard, tmp_path):
    hub.export(bard, tmp_path / "out")
    reloaded = hub.pipeline(tmp_path / "out")
    assert reloaded.task == "text"
    assert reloaded.generate(TEXT, max_new_tokens=20) == bard.generate(TEXT, max_new_tokens=20)


@pytest.fixture
def reader(tmp_path):
    """A tiny BERT with a tokenizer, as sentence-transformers would lay it out."""
    return save_text_encoder(tmp_path)


TEXTS = ["the quick brown fox", "dog", "the lazy dog the"]


def test_embed_batch_equals_single_texts(reader):
    trained = hub.pipeline(reader, dtype=torch.float64)
    vectors = trained.embed(TEXTS, batch_size=2)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([trained.tokenizer.prompt(text)[: trained.model.config.max_len]])
        expected = trained.model(ids)[0].mean(0)
        torch.testing.assert_close(vector, expected.float())
        torch.testing.assert_close(trained.embed(text), expected.float())


def test_embed_uses_the_pooling_of_sentence_transformers(reader):
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


def test_classify_text_matches_transformers(reader, tmp_path):
    transformers = pytest.importorskip("transformers")
    names = {0: "calm", 1: "angry", 2: "glad"}
    config = transformers.BertConfig.from_pretrained(reader, id2label=names, label2id={v: k for k, v in names.items()})
    reference = transformers.BertForSequenceClassification(config).eval()
    reference.save_pretrained(reader)
    trained = hub.pipeline(reader)
    got = trained.classify(TEXTS, batch_size=2)
    for text, probabilities in zip(TEXTS, got, strict=True):
        ids = torch.tensor([trained.tokenizer.prompt(text, 13)])
        expected = reference(ids).logits.softmax(-1)[0].tolist()
        assert probabilities == pytest.approx({names[i]: expected[i] for i in range(3)}, abs=1e-5)
        assert list(probabilities.values()) == sorted(expected, reverse=True) or max(expected) - min(expected) < 1e-5
        assert trained.classify(text) == pytest.approx(probabilities, abs=1e-6)
    hub.export(trained, tmp_path / "out")
    for actual, expected in zip(hub.pipeline(tmp_path / "out").classify(TEXTS, batch_size=2), got, strict=True):
        assert actual == pytest.approx(expected, abs=1e-6)
    file = reader / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"problem_type": "multi_label_classification"}))
    multi_label = hub.pipeline(reader).classify(TEXTS[0])
    logits = reference(torch.tensor([trained.tokenizer.prompt(TEXTS[0], 13)])).logits[0].sigmoid().tolist()
    assert multi_label == pytest.approx({names[i]: logits[i] for i in range(3)}, abs=1e-5)


def test_translate_matches_transformers_with_generation_config(tmp_path):
    """Start ids, stop ids and constraints come from the folder."""
    inner, specials = word_piece()
    peer = replace(PEERS["bart"], sizes=PEERS["bart"].sizes | {"vocab_size": inner.get_vocab_size()})
    torch.manual_seed(4)
    reference = peer.build()
    reference.generation_config.no_repeat_ngram_size = 2
    reference.generation_config.min_new_tokens = 5
    reference.generation_config.max_length = None
    peer.save(reference, tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(specials))
    trained = hub.pipeline(tmp_path, dtype=torch.float64)
    got = trained.translate(TEXTS, strategy=Greedy(), max_new_tokens=7)
    for text, translation in zip(TEXTS, got, strict=True):
        ids = reference.generate(torch.tensor([trained.tokenizer.prompt(text)]), max_new_tokens=7, do_sample=False)
        assert translation == trained.tokenizer.decode(ids[0, 1:].tolist()).strip()
        assert translation == trained.generate(text, max_new_tokens=7)
    assert len(set(got)) > 1


def test_classify_image_matches_transformers(tmp_path):
    reference, folder = PEERS["vit"].build(), tmp_path / "vit"
    PEERS["vit"].save(reference, folder)
    images = PEERS["vit"].inputs()
    expected = reference(images).logits.softmax(-1)[0].tolist()
    got = hub.pipeline(folder, dtype=torch.float64).classify(images)[0]
    assert got == pytest.approx({f"LABEL_{i}": expected[i] for i in range(5)}, abs=1e-6)


@pytest.mark.bad_input
def test_invalid_input_raises(bard, reader):
    with pytest.raises(DataError, match="prompt is empty"):
        bard.generate("")
    with pytest.raises(DataError, match="the context of"):
        bard.generate("x" * 400)
    for method in (bard.embed, bard.classify):
        with pytest.raises(
            DataError, match="shakespeare has the type Decoder; expected an Encoder, such as BERT, to embed or"
        ):
            method("x")
    for texts in (3, [3], [["x"]], None):
        with pytest.raises(DataError, match="expected a text or a list of texts"):
            bard.generate(texts)
    for function in (lambda: ch.apply_mask(bard, causal()).__enter__(), lambda: ch.save(bard, "folder")):
        with pytest.raises(DtypeError, match="got a Pipeline; expected a PyTorch module, such as the model of a pipe"):
            function()


@pytest.mark.bad_input
def test_generate_with_invalid_number_of_tokens_raises(bard):
    for number in ("x", 0, 2.5):
        with pytest.raises(ConfigError, match=r"max_new_tokens is .*; expected a whole number of at least 1"):
            bard.generate("two", max_new_tokens=number)
    for texts in (b"two", {"text": "two"}):
        with pytest.raises(DataError, match="expected a text or a list of texts"):
            bard.generate(texts)


def test_induction_scores_accept_a_pipeline(bard):
    scores = analysis.induction_scores(bard, length=5, batch=1)
    expected = analysis.induction_scores(bard.model, length=5, batch=1)
    assert scores.to_dict() == expected.to_dict()


@pytest.mark.bad_input
def test_pipelines_of_another_kind_raise(bard, reader):
    with pytest.raises(ShapeError, match="has no classification head"):
        hub.pipeline(reader).classify("dog")
    with pytest.raises(DataError, match="was trained for vectors"):
        hub.pipeline(reader).generate("x")


@pytest.mark.bad_input
def test_pipeline_tokenizer_larger_than_vocabulary_raises(reader):
    config = json.loads((reader / "config.json").read_text())
    inner, _ = word_piece()
    inner.add_tokens(["one-more-token"])
    inner.save(str(reader / "tokenizer.json"))
    with pytest.raises(StorageError, match=f"vocabulary ends at {config['vocab_size'] - 1}: they do not match"):
        hub.pipeline(reader)
