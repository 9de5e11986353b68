"""The comparison actions: pairs of positions, and differences compared with two separate runs."""

from __future__ import annotations

import pytest
import torch

from clearhead import analysis, hub
from clearhead.explorer.comparison_panel import pair_tokens

TEXTS = ("D A A C B A", "D A A C E A")


@pytest.fixture(scope="module")
def two_texts(page):
    """The complete runs of two texts that differ by a letter, as the fields of a comparison."""
    sides = []
    for text in TEXTS:
        run = page.post("run", {"model": "sort-dedup", "text": text, "complete": True})
        sides.append({"model": "sort-dedup", "ids": run["ids"], "n_prompt": run["n_prompt"]})
    return {"first": sides[0], "second": sides[1]}


@pytest.fixture(scope="module")
def sorter():
    return hub.pipeline("sort-dedup").model


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("the house is red", "the house is red", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("the house is red", "the car is red", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("a b c", "a x y c", [(0, 0), (2, 3)]),
        ("a b", "b a b", [(0, 1), (1, 2)]),
    ],
    ids=["equal", "one word", "longer replacement", "insertion"],
)
def test_pair_tokens_pairs_equal_and_replaced_tokens(first, second, expected):
    assert pair_tokens(first.split(), second.split()) == expected


def test_compare_attention_returns_the_difference_of_two_traces(page, two_texts, sorter):
    answer = page.post("compare_attention", two_texts | {"layer": "blocks.1.attention", "head": 2})
    weights = []
    for side in ("first", "second"):
        with torch.no_grad(), analysis.trace(sorter, "blocks.1.attention.weights") as t:
            sorter(torch.tensor([two_texts[side]["ids"][:-1]]))
        weights.append(t.weights("blocks.1.attention", heads=2)[0, 0])
    first, second, difference = (matrix["values"] for matrix in answer["maps"])
    torch.testing.assert_close(torch.tensor(first), weights[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(second), weights[1], atol=1e-4, rtol=0)
    n_prompt = two_texts["first"]["n_prompt"]
    for i in range(n_prompt):  # all letters of the texts are paired one to one
        for k in range(n_prompt):
            assert difference[i][k] == pytest.approx(second[i][k] - first[i][k], abs=2e-4)


def test_compare_attention_of_a_run_with_itself_is_zero(page, two_texts):
    same = {"first": two_texts["first"], "second": two_texts["first"]}
    answer = page.post("compare_attention", same)
    assert {value for row in answer["rows"] for value in row["heads"]} == {0.0}
    assert {value for row in answer["maps"][2]["values"] for value in row} == {0.0}


def test_compare_outputs_returns_the_probability_of_the_same_token_in_both_runs(page, two_texts, sorter):
    answer = page.post("compare_outputs", two_texts)
    with torch.no_grad():
        probs = [sorter(torch.tensor([two_texts[side]["ids"][:-1]]))[0].softmax(-1) for side in ("first", "second")]
    column = answer["columns"][0]  # the first output token of both runs is an A
    position = two_texts["first"]["n_prompt"] - 1
    id_ = two_texts["first"]["ids"][position + 1]
    assert column["first"] == pytest.approx(float(probs[0][position, id_]), abs=1e-5)
    assert column["second"] == pytest.approx(float(probs[1][position, id_]), abs=1e-5)
    assert column["difference"] == pytest.approx(column["second"] - column["first"], abs=1e-9)


def test_compare_lenses_marks_different_predictions(page, two_texts):
    answer = page.post("compare_lenses", two_texts)
    first, second = answer["sides"]
    assert first["rows"] == second["rows"]
    pairs = dict(pair_tokens(first["tokens"], second["tokens"]))
    for i, row in enumerate(answer["difference"]):
        for j, value in enumerate(row):
            if j not in pairs:
                assert value is None
            elif first["texts"][i][j] != second["texts"][i][pairs[j]]:
                assert value == -1
            else:
                change = second["probabilities"][i][pairs[j]] - first["probabilities"][i][j]
                assert value == pytest.approx(change, abs=1e-4)


def test_compare_streams_returns_one_minus_cosine(page, two_texts, sorter):
    (stack,) = page.post("compare_streams", two_texts)["stacks"]
    states = []
    for side in ("first", "second"):
        with torch.no_grad(), analysis.trace(sorter, "blocks.0.output") as t:
            sorter(torch.tensor([two_texts[side]["ids"][:-1]]))
        states.append(t.output("blocks.0")[0])
    changed = 4  # the letter that differs
    expected = 1 - torch.cosine_similarity(states[0][changed], states[1][changed], dim=0)
    assert stack["difference"][0][changed] == pytest.approx(float(expected), abs=1e-3)
    assert stack["difference"][0][0] == pytest.approx(0, abs=1e-3)  # nothing before it differs
    assert stack["norms"][0][0][0] == pytest.approx(float(states[0][0].norm()), rel=1e-3)


def test_compare_ablations_equals_two_causal_maps(page, two_texts):
    layers = {"layers": ["blocks.2.attention"]}
    answer = page.post("compare_ablations", two_texts | layers | {"first_step": 0, "second_step": 0})
    (row,) = answer["rows"]
    for side in ("first", "second"):
        (expected,) = page.post("causal_map", two_texts[side] | layers | {"step": 0})["rows"]
        parts = [*expected["heads"], expected["layer"], expected["feed_forward"]["value"], expected["skip"]]
        assert row[side] == pytest.approx(parts, abs=1e-5)
    assert row["difference"] == pytest.approx(
        [b - a for a, b in zip(row["first"], row["second"], strict=True)], abs=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second": {"model": "digits-vit"}}, "does not generate text"),
        ({"second": {"model": "sort-dedup@40", "text": "A B"}}, "has no checkpoints"),
        ({"second": {"model": "../letters@40", "text": "A B"}}, "unknown model"),
        ({"layer": "blocks.9.attention"}, "unknown layer"),
        ({"layer": "blocks.0.attention", "head": 99}, "expected 0 to 3"),
    ],
)
def test_invalid_comparisons_are_rejected(page, two_texts, changes, message):
    assert message in page.post("compare_attention", two_texts | changes)["error"]
