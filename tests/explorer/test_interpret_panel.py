"""The interpret, causal-map and tour actions, compared with direct calls of the analysis package."""

from __future__ import annotations

import threading

import pytest
import torch

from clearhead import analysis, hub
from clearhead.explorer.request import ModelRegistry, RequestContext
from clearhead.explorer.worker_pool import ServerLimits


@pytest.fixture(scope="module")
def sorted_letters(page):
    """The ids of a complete run, and its input for other actions."""
    result = page.post("run", {"model": "sort-dedup", "text": "D A C", "complete": True})
    input_ = {"model": "sort-dedup", "ids": result["ids"], "n_prompt": result["n_prompt"]}
    return result, input_


@pytest.fixture(scope="module")
def sorter():
    return hub.pipeline("sort-dedup").model


def test_causal_map_equals_the_ablation_of_each_head(page, sorter, sorted_letters):
    result, input_ = sorted_letters
    answer = page.post("causal_map", input_ | {"step": 1, "layers": ["blocks.1.attention"]})
    ids = torch.tensor([result["ids"][:-1]])
    metric = analysis.LogitMetric(token=result["ids"][result["n_prompt"] + 1], position=result["n_prompt"])
    expected = analysis.ablate(sorter, ids, metric, modules="blocks.1.attention")
    (row,) = answer["rows"]
    assert row["heads"] == pytest.approx(expected.change[0].tolist(), abs=1e-4)
    # The block without its two branches returns its input.
    with torch.no_grad(), analysis.trace(sorter, "output") as skipped:
        for path in ("blocks.1.attention", "blocks.1.feed_forward"):
            skipped.intervene(path, analysis.ZeroAblation())
        logits = sorter(ids)
    assert row["skip"] == pytest.approx(float(metric(logits)) - answer["baseline"], abs=1e-3)


@pytest.mark.parametrize("name", ["shakespeare", "en-es", "sort-dedup"])
def test_texts_offered_for_patching_have_the_same_number_of_tokens(name):
    registry = ModelRegistry([name], ServerLimits())
    context = RequestContext(registry, lambda *_: None, threading.Event())
    (model,) = registry.run("models", {}, context)["models"]
    runs = [registry.run("run", {"model": name, "text": text}, context) for text in model["contrast"]]
    assert len(runs) == 2
    assert len({len(run["source_ids"]) or run["n_prompt"] for run in runs}) == 1


def test_explain_token_returns_contributions_and_their_ablations(page, sorter, sorted_letters):
    result, input_ = sorted_letters
    answer = page.post("explain_token", input_ | {"step": 0})
    metric = analysis.LogitMetric(token=result["ids"][result["n_prompt"]], position=result["n_prompt"] - 1)
    attribution = analysis.attribute(sorter, torch.tensor([result["ids"][:-1]]), metric)
    values = {part.name: part.value for part in attribution.parts}
    for part in answer["parts"]:
        assert part["value"] == pytest.approx(values[part["name"]], abs=1e-4)
        for source in part["sources"]:
            assert 0 <= source["share"] <= 1
    total = sum(part["value"] for part in answer["parts"]) + answer["others"]
    assert total == pytest.approx(answer["logit"], abs=1e-4)


def test_logit_lens_ends_with_the_predictions_of_the_model(page, sorter, sorted_letters):
    result, input_ = sorted_letters
    lens = page.post("logit_lens", input_)
    with torch.no_grad():
        ids = sorter(torch.tensor([result["ids"][:-1]]))[0].argmax(-1)
    names = hub.pipeline("sort-dedup").tokenizer.tokens
    assert lens["texts"][-1] == names(ids[lens["positions"]].tolist())


def test_patching_grid_restores_the_logit_fully_at_the_last_block(page, sorted_letters):
    _, input_ = sorted_letters
    answer = page.post("patching_grid", input_ | {"step": 0, "other_text": "D B C"})
    (grid,) = answer["grids"]
    position = input_["n_prompt"] - 1
    assert grid["restored"][-1][position] == pytest.approx(1, abs=1e-3)
    error = page.post("patching_grid", input_ | {"other_text": "D B"})
    assert error["error"] == "this text has 3 tokens and the first one 4; expected the same number"
    assert error["field"] == "other_text"


def test_patching_grid_explains_the_token_that_the_second_text_makes_least_probable(page, sorter, sorted_letters):
    result, input_ = sorted_letters  # "D A C" → A C D
    tokenizer = hub.pipeline("sort-dedup").tokenizer
    other = torch.tensor([[*tokenizer.encode("D A B"), tokenizer.bos_id, *result["ids"][4:-1]]])
    ids = torch.tensor(result["ids"])
    with torch.no_grad():
        logits = sorter(torch.cat([ids[None, :-1], other]))[:, 3:].log_softmax(-1)
    first, second = logits[:, torch.arange(4), ids[4:]]
    answer = page.post("patching_grid", input_ | {"other_text": "D A B"})
    assert answer["step"] == int((first - second).argmax()) == 1
    assert [grid["first"] for grid in answer["grids"]] == [2]  # "D A" is the same in both texts
    assert answer["grids"][0]["restored"][0][:2] == [0, 0]
    (last,) = page.post("patching_grid", input_ | {"other_text": "D A B", "blocks": ["blocks.2"]})["grids"]
    assert last["rows"] == ["blocks.2"]
    assert last["restored"][0] == pytest.approx(answer["grids"][0]["restored"][2], abs=1e-5)
    error = page.post("patching_grid", input_ | {"other_text": "D A B", "blocks": ["blocks.7"]})
    assert "unknown block 'blocks.7'" in error["error"]
    assert answer["target"].strip() == "C"


def test_induction_and_neurons_have_one_row_per_layer_and_neuron(page, sorted_letters):
    _, input_ = sorted_letters
    assert len(page.post("induction", {"model": "sort-dedup"})["induction"]) == 3
    answer = page.post("neurons", input_ | {"block": 1})
    assert answer["path"].startswith("blocks.1.feed_forward")
    assert {len(neuron["activations"]) for neuron in answer["neurons"]} == {len(answer["tokens"])}


def test_tour_has_seven_steps_with_links(page, sorted_letters):
    _, input_ = sorted_letters
    steps = page.post("tour", input_)["steps"]
    assert len(steps) == 7
    assert {link["panel"] for step in steps for link in step["links"]} == {"model", "interpret", "intervention"}
