"""Bundled models: complete, small enough, documented, and as accurate as their cards state."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors import safe_open

from clearhead import hub
from clearhead.errors import DataError, StorageError
from clearhead.hub.bundled import BUNDLED_FOLDER, model_folder, read_card
from tools.card import to_toml

FIELDS = {
    "description",
    "data",
    "license",
    "command",
    "trained_on",
    "train_seconds",
    "task",
    "preset",
    "seed",
    "parameters",
    "summary",
    "metrics",
}


@pytest.fixture(scope="module")
def translator():
    return hub.pipeline("en-es")


def test_bundled_models_fit_the_size_limit():
    size = sum(path.stat().st_size for name in hub.names() for path in (BUNDLED_FOLDER / name).iterdir())
    assert 0 < size <= 40e6


@pytest.mark.parametrize("name", hub.names())
def test_bundled_model_is_complete_and_in_half_precision(name):
    trained = hub.pipeline(name)
    assert not trained.model.training
    assert set(trained.card) == FIELDS
    assert trained.card["parameters"] == sum(p.numel() for p in trained.model.parameters())
    assert trained.card["task"] == trained.task
    with safe_open(trained.folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118 - not a dict


def test_card_round_trips_through_toml(tmp_path):
    card = hub.cards()["en-es"]
    (tmp_path / "card.toml").write_text(to_toml(card), encoding="utf-8")
    assert read_card(tmp_path) == card


def test_sort_dedup_metrics_match_its_card():
    trained = hub.pipeline("sort-dedup")
    evaluation = hub.evaluate(trained)
    card_metrics = trained.card["metrics"]["greedy"]
    assert evaluation.exact_match == card_metrics["exact_match"] == 1.0
    assert evaluation.examples == card_metrics["examples"]
    # The loss is below float32's rounding of a log-softmax: eps times the largest logit, which is less than 32.
    assert evaluation.loss == pytest.approx(card_metrics["loss"], rel=0.05, abs=32 * torch.finfo(torch.float32).eps)


class TestTranslate:
    texts = (
        "Thank you.",
        "",
        "I don't know where the library is.",
        "  ",
        "Yes.",
        "We are going to the beach tomorrow.",
    )

    def test_translate_keeps_the_order_of_texts(self, translator):
        together = hub.translate(translator, self.texts)
        assert together == [hub.translate(translator, [text])[0] for text in self.texts]
        assert together == hub.translate(translator, self.texts, batch_size=1)
        assert together[0] == "Gracias."
        assert together[1] == together[3] == ""

    def test_translate_reports_progress(self, translator):
        done = []
        hub.translate(translator, ["Yes.", "No.", "Thank you."], batch_size=2, on_done=done.append)
        assert done == [2, 3]

    def test_translate_no_texts_returns_empty_list(self, translator):
        assert hub.translate(translator, []) == []


class TestEvaluate:
    pairs = (("Thank you.", "Gracias."), ("I love you.", "Te amo."), ("Where is she?", "¿Dónde está ella?"))

    def test_evaluate_matches_a_teacher_forced_sum_and_sacrebleu(self, translator, tmp_path):
        from sacrebleu.metrics import BLEU

        path = tmp_path / "pairs.tsv"
        path.write_text("".join(f"{a}\t{b}\n" for a, b in self.pairs), encoding="utf-8")
        result = hub.evaluate(translator, path)
        tokenizer, total, n_correct, n_labels = translator.tokenizer, 0.0, 0, 0
        for source, target in self.pairs:
            ids = torch.tensor([[*tokenizer.encode(source), tokenizer.eos_id]])
            out = [tokenizer.bos_id, *tokenizer.encode(target), tokenizer.eos_id]
            with torch.no_grad():
                log_probs = translator.model(ids, torch.tensor([out[:-1]])).log_softmax(-1)[0]
            for row, label in zip(log_probs, out[1:], strict=True):
                total -= row[label].item()
                n_correct += int(row.argmax() == label)
                n_labels += 1
        assert result.n_tokens == n_labels
        assert result.loss == pytest.approx(total / n_labels, rel=1e-5)
        assert result.accuracy == n_correct / n_labels
        assert result.perplexity == pytest.approx(math.exp(total / n_labels), rel=1e-5)
        from clearhead.generation import Greedy

        outputs = hub.translate(translator, [a for a, _ in self.pairs], strategy=Greedy())
        assert result.bleu == pytest.approx(BLEU().corpus_score(outputs, [[b for _, b in self.pairs]]).score)
        assert "tok:13a" in result.signature


@pytest.mark.bad_input
class TestErrors:
    def test_model_folder_unknown_name_or_empty_folder_raises(self, tmp_path):
        with pytest.raises(StorageError, match="did you mean 'shakespeare'"):
            model_folder("shakespear")
        with pytest.raises(StorageError, match=r"contains no model: expected config\.toml"):
            model_folder(tmp_path)
        (tmp_path / "train.toml").touch()
        with pytest.raises(StorageError, match="clearhead train --resume"):
            model_folder(tmp_path)

    def test_read_card_invalid_toml_raises(self, tmp_path):
        (tmp_path / "card.toml").write_text("= nothing")
        with pytest.raises(StorageError, match="is not a card"):
            read_card(tmp_path)

    def test_pipeline_of_another_task_raises(self):
        trained = hub.pipeline("digits-conv")
        with pytest.raises(DataError, match="was trained for digits, and this needs a model for translation"):
            hub.translate(trained, ["Hi"])
        with pytest.raises(DataError, match="has no tokenizer"):
            _ = trained.tokenizer
