"""Masked tokens, tags, answers and choices, compared with the pipelines and models of transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from clearhead import hub
from clearhead.errors import ConfigError, DataError
from tests.support.third_party_models import PEERS

transformers = pytest.importorskip("transformers", reason="transformers, the reference to compare with, is missing")

WORDS = ["the", "quick", "brown", "fox", "jump", "##s", "over", "lazy", "dog", "who", "what", "?", "."]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "fox", "The dog jumps. The fox jumps over the quick dog"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function from a name of `PEERS` to a folder with a BERT, its tokenizer and labels, and the model."""

    def save(name, **config):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        peer = replace(
            PEERS[name], sizes=PEERS[name].sizes | {"vocab_size": len(PIECES), "max_position_embeddings": 40, **config}
        )
        torch.manual_seed(3)
        reference = peer.build().float()
        peer.save(reference, folder)
        (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
        tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
        return folder, reference, tokenizer

    return save


def test_fill_mask_matches_transformers(saved):
    folder, reference, tokenizer = saved("bert masked")
    trained = hub.pipeline(folder)
    pipe = transformers.pipeline("fill-mask", model=reference, tokenizer=tokenizer, top_k=4)
    text = "the [MASK] fox jumps over the lazy dog"
    (tokens,) = trained.fill_mask(text, n=4)
    expected = pipe(text)
    assert [token.id for token in tokens] == [item["token"] for item in expected]
    assert [token.text for token in tokens] == [item["token_str"] for item in expected]
    assert [token.probability for token in tokens] == pytest.approx([item["score"] for item in expected], abs=1e-5)
    two = trained.fill_mask(["the [MASK] [MASK] jumps", text], n=4)
    assert [len(positions) for positions in two] == [2, 1]
    assert [token.id for token in two[1][0]] == [token.id for token in tokens]
    # A larger number returns the whole vocabulary.
    assert sorted(token.id for token in trained.fill_mask(text, n=99)[0]) == list(range(len(PIECES)))


@pytest.mark.bad_input
def test_fill_mask_and_embed_reject_invalid_numbers(saved):
    trained = hub.pipeline(saved("bert masked")[0])
    for n in (0, -1, 2.5):
        with pytest.raises(ConfigError, match=f"n is {n}; expected a whole number of at least 1"):
            trained.fill_mask("the [MASK] fox", n=n)
    with pytest.raises(ConfigError, match="batch_size is 0; expected a whole number of at least 1"):
        trained.embed(TEXTS, batch_size=0)


def test_tag_matches_transformers(saved):
    labels = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
    folder, reference, tokenizer = saved("bert token", id2label=labels, label2id={v: k for k, v in labels.items()})
    trained = hub.pipeline(folder)
    pipe = transformers.pipeline("ner", model=reference, tokenizer=tokenizer, aggregation_strategy="simple")
    results = trained.tag(TEXTS)
    assert any(len(spans) > 1 for spans in results)
    for text, spans in zip(TEXTS, results, strict=True):
        expected = pipe(text)
        assert [(span.label, span.start, span.end) for span in spans] == [
            (item["entity_group"], item["start"], item["end"]) for item in expected
        ]
        assert [span.probability for span in spans] == pytest.approx([item["score"] for item in expected], abs=1e-5)
        assert all(span.text == text[span.start : span.end] for span in spans)
        assert trained.tag(text) == spans


def test_answer_matches_the_logits_of_transformers(saved):
    """The best pair of a start and an end, at most 15 tokens apart, within the context."""
    folder, reference, tokenizer = saved("bert span")
    trained = hub.pipeline(folder)
    for question, context in (("who jumps?", TEXTS[0]), ("what fox?", TEXTS[2]), ("quick", "the dog")):
        inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        spans = inputs.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            output = reference(**inputs)
        tokens = [i for i, sequence in enumerate(inputs.sequence_ids(0)) if sequence == 1]
        start, end = output.start_logits[0, tokens].softmax(-1), output.end_logits[0, tokens].softmax(-1)
        pairs = [
            (float(start[i] * end[j]), i, j) for i in range(len(tokens)) for j in range(i, min(i + 15, len(tokens)))
        ]
        probability, i, j = max(pairs)
        answer = trained.answer(question, context)
        assert (answer.start, answer.end) == (spans[tokens[i]][0], spans[tokens[j]][1])
        assert answer.text == context[answer.start : answer.end]
        assert answer.probability == pytest.approx(probability, abs=1e-5)
    answers = trained.answer(["who jumps?", "what fox?"], [TEXTS[0], TEXTS[2]])
    assert answers[0].text == trained.answer("who jumps?", TEXTS[0]).text


def test_answer_in_a_long_context_is_found_in_a_window(saved):
    folder, reference, tokenizer = saved("bert span", max_position_embeddings=20)
    trained = hub.pipeline(folder)
    context = " ".join(TEXTS * 3)
    answer = trained.answer("who?", context)
    windows = tokenizer(
        "who?", context, truncation="only_second", max_length=20, stride=5, return_overflowing_tokens=True, padding=True
    )
    best = 0.0
    for k in range(len(windows["input_ids"])):
        row = {name: torch.tensor([windows[name][k]]) for name in ("input_ids", "attention_mask", "token_type_ids")}
        with torch.no_grad():
            output = reference(**row)
        tokens = [i for i, sequence in enumerate(windows.sequence_ids(k)) if sequence == 1]
        joint = output.start_logits[0, tokens].softmax(-1)[:, None] * output.end_logits[0, tokens].softmax(-1)
        best = max(best, float(joint.triu().tril(14).max()))
    assert len(windows["input_ids"]) > 2
    assert answer.probability == pytest.approx(best, abs=1e-5)


def test_choose_matches_transformers(saved, tmp_path):
    folder, _, tokenizer = saved("bert")
    torch.manual_seed(5)
    reference = transformers.BertForMultipleChoice(transformers.BertConfig.from_pretrained(folder)).eval()
    reference.save_pretrained(folder)
    trained = hub.pipeline(folder)
    choices = ["the lazy dog", "fox", "the quick fox jumps"]
    inputs = tokenizer(["who jumps?"] * 3, choices, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = reference(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0].softmax(-1).tolist()
    probabilities = trained.choose("who jumps?", choices)
    assert probabilities == pytest.approx(dict(zip(choices, expected, strict=True)), abs=1e-5)
    assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)


@pytest.mark.bad_input
def test_missing_heads_and_inputs_raise(saved):
    tagger = hub.pipeline(saved("bert token")[0])
    with pytest.raises(DataError, match="cannot predict masked tokens: it is an Encoder with a 'token' head"):
        tagger.fill_mask("the [MASK]")
    with pytest.raises(DataError, match="questions and contexts differ in number"):
        tagger.answer(["a", "b"], ["c"])
    with pytest.raises(DataError, match="cannot answer questions: it is a Decoder with no head"):
        hub.pipeline("shakespeare").answer("a", "b")
    with pytest.raises(DataError, match="a text has 42 tokens, more than the 40"):
        tagger.tag("fox " * 40)
    masked = hub.pipeline(saved("bert masked")[0])
    with pytest.raises(DataError, match=r"has no mask token; write \[MASK\] in place of a word"):
        masked.fill_mask("the fox")


def test_bare_bert_reports_its_missing_head(saved):
    folder, *_ = saved("bert")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertModel"]
    with pytest.raises(DataError, match="cannot tag tokens: it is an Encoder with no head"):
        hub.pipeline(folder).tag("fox")
