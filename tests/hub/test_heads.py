"""Heads of encoders: the class that `architectures` names decides, and heads that are not loaded are named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.errors import ShapeError, StorageError
from clearhead.hub import convert
from tests.hub.conftest import change_json
from tests.support.encoder_models import HEADS
from tests.support.reference_models import M, in_float64, perturbed, words
from tests.support.third_party_models import BERT


@pytest.fixture
def tagger(saved_peer, tmp_path):
    """A copy of a token classifier, and the reference model."""
    reference, folder = saved_peer("bert token")
    return reference, shutil.copytree(folder, tmp_path / "tagger")


def add_tensors(folder, **tensors):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


def test_token_classifier_with_a_stored_pooler_classifies_tokens(tagger):
    reference, folder = tagger
    weight, bias = torch.randn(M, M, dtype=torch.float64), torch.randn(M, dtype=torch.float64)
    add_tensors(folder, bert__pooler__dense__weight=weight, bert__pooler__dense__bias=bias)
    model = ch.load(folder, dtype=None)
    assert model.config.head == "token"
    ids = words()
    torch.testing.assert_close(model.classify_tokens(model(ids)), reference(ids).logits)
    with pytest.raises(ShapeError, match="no classification head"):
        model.classify(model(ids))


def test_pretraining_checkpoint_loads_the_head_for_masked_tokens_and_names_the_other(saved_peer, tmp_path):
    reference, folder = saved_peer("bert masked")
    folder = shutil.copytree(folder, tmp_path / "pretraining")
    change_json(folder / "config.json", architectures=["BertForPreTraining"])
    weight = torch.zeros(2, M, dtype=torch.float64)
    add_tensors(folder, cls__seq_relationship__weight=weight, cls__seq_relationship__bias=weight[:, 0].clone())
    with pytest.warns(UserWarning, match=r"cls\.seq_relationship.*: the head for next-sentence prediction"):
        model = ch.load(folder, dtype=None)
    ids = words()
    torch.testing.assert_close(model.predict_tokens(model(ids)), reference(ids).logits)


def test_bare_model_with_a_stored_head_names_the_head(saved_peer, tmp_path):
    folder = shutil.copytree(saved_peer("bert masked")[1], tmp_path / "bare")
    change_json(folder / "config.json", architectures=["BertModel"])
    with pytest.warns(UserWarning, match="are not loaded .*: the head for masked tokens"):
        model = ch.load(folder, dtype=None)
    assert model.head is None


def test_multiple_choice_scores_equal_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")

    with in_float64():
        reference = perturbed(transformers.BertForMultipleChoice(transformers.BertConfig(**BERT)))
    reference.save_pretrained(tmp_path)
    model = ch.load(tmp_path, dtype=None)
    assert (model.config.head, model.config.n_classes) == ("choice", 1)
    ids = words()
    torch.testing.assert_close(model.classify(model(ids)).T, reference(ids[None]).logits)


@pytest.mark.parametrize("name", HEADS)
def test_head_and_its_export_equal_the_reference(name, tmp_path):
    peer, inputs = HEADS[name], words()
    reference = peer.build()
    peer.save(reference, tmp_path / "in")
    model = ch.load(tmp_path / "in", dtype=None)
    convert.export_third_party(model, tmp_path / "out", family=reference.config.model_type)
    reloaded = peer.reload(tmp_path / "out")
    assert type(reloaded) is type(reference)
    with torch.no_grad():
        expected = peer.run(reference, inputs)
        torch.testing.assert_close(peer.comparable(model)(inputs), expected, rtol=0, atol=1e-12 * expected.abs().max())
    state = reference.state_dict()
    for parameter, tensor in reloaded.state_dict().items():
        assert torch.equal(tensor, state[parameter]), parameter


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["BertForNextSentencePrediction", "BertForSomethingElse"])
def test_unsupported_head_is_rejected_by_name(tagger, name):
    _, folder = tagger
    change_json(folder / "config.json", architectures=[name])
    with pytest.raises(StorageError, match=f"architectures is .*{name}.*whose head is not supported"):
        ch.load(folder, dtype=None)


@pytest.mark.bad_input
def test_untied_output_matrix_is_rejected_by_name(saved_peer, tmp_path):
    folder = shutil.copytree(saved_peer("bert masked")[1], tmp_path / "untied")
    change_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(StorageError, match="tie_word_embeddings is False"):
        ch.load(folder, dtype=None)


def test_exported_head_names_its_class(tagger, tmp_path):
    convert.export_third_party(ch.load(tagger[1]), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForTokenClassification"]
