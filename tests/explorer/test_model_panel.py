"""The model, intervention and digit panels, compared with direct calls of the model."""

from __future__ import annotations

import base64
import contextlib
import io
import math
from pathlib import Path

import pytest
import torch

from clearhead import analysis, hub
from clearhead.data.image_transforms import prepare
from clearhead.generation import BeamSearch, generate

IMAGE = torch.zeros(32, 32, dtype=torch.uint8)
IMAGE[6:26, 15:18] = 240
PIXELS = base64.b64encode(IMAGE.numpy().tobytes()).decode()


@pytest.fixture(scope="module")
def sorter():
    return hub.pipeline("sort-dedup")


@pytest.fixture(scope="module")
def translator():
    return hub.pipeline("en-es")


@torch.no_grad()
def test_run_returns_sampling_probabilities_of_the_next_token(page, sorter):
    result = page.post("run", {"model": "sort-dedup", "text": "D A C", "temperature": 0.5, "top_k": 3, "seed": 4})
    ids = [*sorter.tokenizer.encode("D A C"), sorter.tokenizer.bos_id]
    assert result["ids"] == ids
    assert result["steps"] == []
    logits = sorter.model(torch.tensor([ids]))[0, -1].double()
    model_probs = logits.softmax(-1)
    top_3 = logits.masked_fill(logits < logits.topk(3).values[-1], -math.inf)
    expected = (top_3 / 0.5).softmax(-1)
    step = result["next"]
    for candidate in step["candidates"]:
        assert candidate["model_probability"] == pytest.approx(float(model_probs[candidate["id"]]), abs=1e-6)
        assert candidate["probability"] == pytest.approx(float(expected[candidate["id"]]), abs=1e-6)
    assert step["n_candidates"] == 3
    assert step["selected"] in [candidate["id"] for candidate in step["candidates"][:3]]


@torch.no_grad()
def test_run_at_temperature_0_equals_greedy_generation(page, sorter):
    ids = [*sorter.tokenizer.encode("D A C"), sorter.tokenizer.bos_id]
    output = generate(sorter.model, torch.tensor([ids]), stop_ids=sorter.tokenizer.eos_id, max_new_tokens=20)
    expected = output.sequence(0, with_stop=True).tolist()
    result = page.post("run", {"model": "sort-dedup", "text": "D A C", "complete": True})
    assert result["ids"] == [*ids, *expected]
    assert result["text"] == sorter.tokenizer.decode(output.sequence(0))
    assert result["is_end"] is True
    assert result["next"] is None


def test_run_step_by_step_equals_a_complete_run(page):
    request = {"model": "en-es", "text": "The house is red.", "temperature": 1.5, "seed": 3}
    complete = page.post("run", request | {"complete": True})
    generated: list[int] = []
    for step in complete["steps"]:
        result = page.post("run", request | {"generated_ids": generated})
        assert result["next"]["selected"] == step["taken"]
        generated.append(step["taken"])
    assert complete["ids"] == [complete["ids"][0], *generated]


def test_run_lists_a_taken_token_that_is_improbable(page, sorter):
    improbable = sorter.tokenizer.encode("Z")[0]
    result = page.post("run", {"model": "sort-dedup", "text": "D A C", "generated_ids": [improbable]})
    step = result["steps"][0]
    assert step["taken"] == improbable
    assert step["rank"] >= 12
    assert improbable in [candidate["id"] for candidate in step["candidates"]]


def test_views_use_the_ids_of_a_run_and_no_text(page):
    result = page.post("run", {"model": "en-es", "text": "The house is red.", "complete": True, "temperature": 2.0})
    input_ = {name: result[name] for name in ("model", "ids", "source_ids", "n_prompt") if name in result}
    input_["model"] = "en-es"
    walkthrough = page.post("walkthrough", input_)
    predicted = [row["token"]["id"] for row in walkthrough["predictions"]]
    assert predicted[: len(result["ids"]) - 1] == result["ids"][1:]
    attention = page.post("attention", input_)
    cross = next(item for item in attention["maps"] if item["kind"] == "cross")
    assert attention["texts"][cross["rows"]][: len(result["tokens"]) - 1] == result["tokens"][1:]
    assert page.post("intervene", input_)["before"]["ids"] == result["ids"]


@torch.no_grad()
def test_run_of_a_translation_uses_source_and_generated_ids(page, translator):
    translation = hub.translations(translator, ["How are you?"])[0]
    generated = list(translation.target_ids[:2])
    result = page.post("run", {"model": "en-es", "text": "How are you?", "generated_ids": generated})
    assert result["source"] == translator.tokenizer.tokens(translation.source_ids)
    target = torch.tensor([[translator.tokenizer.bos_id, *generated]])
    logits = translator.model(torch.tensor([translation.source_ids]), target)
    probs = logits[0, -1].double().softmax(-1)
    assert result["next"]["candidates"][0]["model_probability"] == pytest.approx(float(probs.max()), abs=1e-5)


def test_listen_returns_the_digits_and_times_of_the_recognizer(page):
    from clearhead.data.audio import read_audio

    samples = read_audio(Path(__file__).parents[2] / "clearhead/explorer/examples/digits.wav", 8000).samples
    data = base64.b64encode((samples * 32767).round().short().numpy().tobytes()).decode()
    result = page.post("listen", {"model": "spoken-digits", "samples": data})
    assert [symbol["text"] for symbol in result["symbols"]] == list("314159")
    recognizer = hub.pipeline("spoken-digits").listen()
    expected = [*recognizer.push(samples), *recognizer.flush()]
    assert [symbol["end"] for symbol in result["symbols"]] == pytest.approx([symbol.end for symbol in expected])
    report = page.post("attention", {"model": "spoken-digits", "samples": data})
    heard = dict(report["metadata"])["heard"]
    assert heard == ", ".join(f"{symbol.text} ({symbol.end:.2f} s)" for symbol in expected)


def test_attention_equals_the_attention_report(page, sorter):
    result = page.post("attention", {"model": "sort-dedup", "text": "D A C"})
    expected = analysis.attention_report(sorter, "D A C")
    assert result["texts"][0] == list(expected.maps[0].rows)
    paths = [attention_map["path"] for attention_map in result["maps"]]
    assert paths == [attention_map.path for attention_map in expected.maps]
    html = page.post("report_page", {"model": "sort-dedup", "text": "D A C"})["html"]
    assert html.startswith("<!doctype html>")
    assert "D A C" in html


def test_walkthrough_returns_all_steps(page, sorter):
    result = page.post("walkthrough", {"model": "sort-dedup", "text": "D A C"})
    expected = analysis.build_walkthrough(sorter, "D A C").to_dict()
    assert [step["role"] for step in result["steps"]] == [step["role"] for step in expected["steps"]]
    assert [row["token"]["token"] for row in result["predictions"]] == ["A", "C", "D", "<STOP>"]
    image_result = page.post("walkthrough", {"model": "digits-vit", "pixels": PIXELS})
    assert image_result["kind"] == "VisionTransformer"


def test_beam_search_returns_the_tree_of_its_hypotheses(page, translator):
    request = {"model": "en-es", "text": "The house is red.", "width": 3, "max_new_tokens": 10}
    result = page.post("beam_search", request)
    encoded = page.post("run", {"model": "en-es", "text": "The house is red."})
    source_ids = hub.translations(translator, ["The house is red."])[0].source_ids
    assert len(encoded["source"]) == len(source_ids)
    output = generate(
        translator.model,
        torch.tensor([source_ids]),
        decoder_start_ids=translator.tokenizer.bos_id,
        stop_ids=translator.tokenizer.eos_id,
        strategy=BeamSearch(3, n_best=3),
        max_new_tokens=10,
    )
    for rank, hypothesis in enumerate(result["hypotheses"]):
        nodes = [result["nodes"][i] for i in hypothesis["nodes"]]
        assert [node["id"] for node in nodes] == output.sequence(0, rank, with_stop=True).tolist()
        assert hypothesis["score"] == pytest.approx(float(output.scores[0, rank]), abs=1e-5)
        mean_log_prob = sum(node["log_prob"] for node in nodes) / len(nodes)
        assert mean_log_prob == pytest.approx(hypothesis["score"], abs=1e-4)
    for i, node in enumerate(result["nodes"]):
        assert node["parent"] is None or node["parent"] < i


@pytest.mark.parametrize(
    ("changes", "has_effect"),
    [
        ({}, False),
        ({"interventions": [{"path": "blocks.1.attention", "heads": [0, 2]}]}, True),
        ({"interventions": [{"path": "blocks.0.attention", "heads": [1], "kind": "scale", "factor": 1.0}]}, False),
        ({"interventions": [{"path": "blocks.2.feed_forward", "kind": "scale", "factor": -0.5}]}, True),
        ({"interventions": [{"path": "blocks.1", "kind": "patch", "positions": [2]}], "patch_text": "A A A A"}, True),
        (
            {
                "interventions": [{"path": "blocks.1.attention", "heads": [3], "kind": "patch"}],
                "patch_text": "D A C B",
            },
            False,
        ),
        ({"mask": "causal() & window(1, 0)"}, True),
        ({"attention_temperature": 4.0}, True),
        ({"interventions": [{"path": "blocks.1", "kind": "skip"}]}, True),
        ({"interventions": [{"path": "blocks.1.attention", "heads": [1], "kind": "mean"}]}, True),
        ({"target_position": 1, "replacement": "E"}, True),
    ],
)
def test_intervene_equals_its_python_script(page, changes, has_effect):
    result = page.post("intervene", {"model": "sort-dedup", "text": "D A C B", **changes})
    assert "error" not in result, result
    assert (result["changes"]["logits"]["kl_largest"] > 1e-9) is has_effect
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(result["python"], names)
    probs = names["after"].output("")[0, -1].double().softmax(-1)
    for candidate in result["after"]["candidates"]:
        assert candidate["probability"] == pytest.approx(float(probs[candidate["id"]]), abs=1e-6)
    probs_before = names["before"].output("")[0, -1].double().softmax(-1)
    best_before = result["before"]["candidates"][0]
    assert best_before["probability"] == pytest.approx(float(probs_before.max()), abs=1e-6)
    weights = names["after"].weights(result["after"]["layer"])[0].mean(0)
    shades = torch.tensor(result["after"]["weights"]) / 255
    torch.testing.assert_close(shades**2, weights.float(), atol=0.006, rtol=0)


def test_intervene_leaves_the_model_unchanged(page):
    request = {"model": "sort-dedup", "text": "D A C B"}
    before = page.post("run", request)
    changes = {"attention_temperature": 9.0, "mask": "full()", "interventions": [{"path": "blocks.0"}]}
    assert "error" not in page.post("intervene", request | changes)
    assert page.post("intervene", request | {"mask": "window(0,"})["error"]
    assert page.post("run", request) == before


SORT = {"model": "sort-dedup", "text": "A B"}


@pytest.mark.parametrize(
    ("action", "request_", "message"),
    [
        ("run", {"model": "shakespeare", "text": "x"}, "unknown model 'shakespeare'"),
        ("run", {"model": "../../etc", "text": "x"}, "unknown model"),
        ("run", {"model": "sort-dedup", "text": " "}, "the input is empty"),
        ("run", {"model": "sort-dedup", "text": "A", "generated_ids": [99999]}, "outside the vocabulary"),
        ("run", {"model": "sort-dedup", "text": "A " * 500}, "shorten it"),
        ("run", {"model": "sort-dedup", "text": "A", "temperature": -1}, "at least 0"),
        ("beam_search", {"model": "sort-dedup", "text": "A", "width": 99}, "at most 8"),
        ("walkthrough", {"model": "digits-vit", "pixels": "AAAA"}, "expected 32 × 32"),
        ("classify_digit", {"pixels": "ü"}, "expected 32 × 32"),
        ("intervene", {**SORT, "interventions": [{"path": "blocks.9"}]}, "unknown module"),
        ("intervene", {**SORT, "interventions": [{"path": "blocks.0", "heads": [1]}]}, "no heads"),
        ("intervene", {**SORT, "target_position": 0, "replacement": "A B"}, "exactly one"),
        (
            "intervene",
            {**SORT, "interventions": [{"path": "blocks.0", "kind": "patch"}], "patch_text": "A B C D"},
            "texts of equal length",
        ),
    ],
)
def test_invalid_requests_are_rejected(page, action, request_, message):
    assert message in page.post(action, request_)["error"]


def test_classify_digit_returns_probabilities_and_maps_of_each_model(page):
    results = page.post("classify_digit", {"pixels": PIXELS})["models"]
    assert [result["name"] for result in results] == ["digits-vit", "digits-conv"]
    for result in results:
        pipeline = hub.pipeline(result["name"])
        logits = pipeline.model(prepare(IMAGE[None], pipeline.recipe.data.normalize))[0]
        assert result["probabilities"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert max(map(max, result["pixel_attribution"])) == 255
    assert len(results[0]["attention"]) == 8
    assert results[1]["attention"] is None


HUGE = 10**40


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("run", {"model": "sort-dedup", "text": "A B", "seed": HUGE}),
        ("run", {"model": "sort-dedup", "text": "A B", "seed": (1 << 64) - 1}),
        ("run", {"model": "sort-dedup", "text": "A B", "top_k": HUGE, "seed": 1}),
        ("run", {"model": "sort-dedup", "text": "A B", "generated_ids": [HUGE]}),
        ("run", {"model": "sort-dedup", "text": "A B", "temperature": HUGE}),
        ("beam_search", {"model": "sort-dedup", "text": "A B", "max_new_tokens": HUGE}),
        ("beam_search", {"model": "sort-dedup", "text": "A B", "length_penalty": HUGE}),
        ("intervene", {**SORT, "target_position": HUGE, "replacement": "C"}),
        ("intervene", {**SORT, "head": HUGE}),
        (
            "intervene",
            {"model": "sort-dedup", "text": "A B", "interventions": [{"path": "blocks.0", "positions": [HUGE]}]},
        ),
        (
            "intervene",
            {"model": "sort-dedup", "text": "A B", "interventions": [{"path": "blocks.0.attention", "heads": [HUGE]}]},
        ),
        ("intervene", {**SORT, "mask": f"window({HUGE}, 0)"}),
        ("mask", {"expression": f"causal() & every({HUGE})", "queries": 16}),
        ("mask", {"expression": "causal()", "queries": 16, "query_offset": HUGE}),
        ("attention_by_hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "order": [0, 1, HUGE]}),
        ("attention_by_hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "perturbed_key": HUGE}),
        ("attention_by_hand", {"vectors": [["1", "0"], ["0", "1"], ["1", str(HUGE)]]}),
        ("cost", {"tokens": HUGE}),
        ("largest_batch", {"memory": HUGE}),
        ("run_claim", {"name": "score-mean", "seed": HUGE}),
        ("worksheet", {"name": "sort-dedup-softmax", "seed": HUGE}),
    ],
)
def test_huge_integers_are_accepted_or_rejected_with_one_sentence(page, request_, action):
    result = page.post(action, request_)
    if "error" in result:
        assert "the request failed" not in result["error"]
        assert len(result["error"]) < 300
