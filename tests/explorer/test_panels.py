"""The mask, by-hand, cost and claims panels, compared with direct calls of the library."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from clearhead import masks
from clearhead.analysis.cost import cost
from clearhead.course import exercises
from clearhead.course.claims import find
from clearhead.explorer.cost_panel import CostRequest


def test_mask_equals_the_dense_mask(page):
    result = page.post("mask", {"expression": "causal() & (window(3, 0) | every(4))", "queries": 13})
    mask = masks.parse("causal() & (window(3, 0) | every(4))")
    dense = mask.dense(13)
    assert result["allowed"] == int(dense.sum())
    assert result["density"] == pytest.approx(float(dense.double().mean()))
    assert torch.equal(torch.tensor(result["cells"]) > 0, dense)
    assert result["may_have_empty_rows"] is False
    assert result["predicted_cost"]["sparse_ms"] > 0
    assert page.post("mask", {"expression": "causal() & nothing()"})["column"] == 12


def test_mask_on_grid_shows_what_one_patch_sees(page):
    expression = "axis(window(1, 1), 0, grid=(4, 8)) & axis(window(2, 2), 1, grid=(4, 8))"
    patch = page.post("mask", {"expression": expression, "queries": 32})["patch"]
    row = masks.parse(expression).dense(32)[2 * 8 + 4].reshape(4, 8)
    assert patch["cells"] == (255 * row.int()).tolist()
    assert patch["caption"] == "what position 20, at (2, 4), sees on a grid of 4 × 8"
    assert page.post("mask", {"expression": "causal()", "queries": 8})["patch"] is None


def test_mask_catalogue_contains_parsable_expressions(page):
    result = page.post("mask_catalogue", {})
    assert len(result["patterns"]) > 10
    for pattern in result["patterns"]:
        masks.parse(pattern["expression"])
    assert result["functions"][2]["usage"] == "window(before, after)"


@pytest.mark.parametrize(
    ("beta", "mask", "order", "kind"),
    [
        ("3/2", "full()", [], "soft"),
        ("1", "causal()", [2, 0, 1], "soft"),
        ("0", "full()", [], "uniform"),
        ("0", "window(1, 1)", [], "convolution"),
        ("inf", "window(0, 0)", [], "identity"),
        ("inf", "full()", [1, 2, 0], "permutation"),
        ("inf", "full()", [1, 1, 0], "hard"),
    ],
)
def test_attention_by_hand_equals_floating_point_attention(page, beta, mask, order, kind):
    vectors = [["1", "0"], ["-1/3", "2/3"], ["-1/2", "-3/4"]]
    request = {
        "vectors": vectors,
        "beta": beta,
        "mask": mask,
        "order": order,
        "perturbed_key": 2,
        "noise": ["1/8", "0"],
        "scale": "3/2",
    }
    result = page.post("attention_by_hand", request)
    x = torch.tensor([[float(Fraction(cell)) for cell in row] for row in vectors], dtype=torch.float64)
    keys = x.clone()
    keys[2] = 1.5 * keys[2] + torch.tensor([0.125, 0.0])
    queries = x[order] if order else x
    scores = queries @ keys.T
    beta_value = float(beta) if "/" not in beta else float(Fraction(beta))
    weights = (scores * min(beta_value, 1e6)).masked_fill(~masks.parse(mask).dense(3), -torch.inf).softmax(-1)
    for name, value in (("scores", scores), ("weights", weights), ("outputs", weights @ x)):
        torch.testing.assert_close(torch.tensor(result[name]["values"], dtype=torch.float64), value)
    assert result["kind"].startswith(kind)
    if kind in ("identity", "permutation"):
        selected = [vectors[i] for i in order or range(3)]  # the same fractions
        assert result["outputs"]["exact"] == [[cell.replace("-", "−") for cell in row] for row in selected]
    if not order:
        assert result["scores"]["exact"][0][2] == "−5/8"


def test_attention_by_hand_returns_exact_numerators_and_row_sums(page):
    result = page.post("attention_by_hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "beta": "2"})
    assert result["weights"]["exact"][0] == ["e^2", "1", "e^2"]
    assert result["row_sums"]["exact"][0] == ["1 + 2·e^2"]
    assert result["outputs"]["exact"][0] == ["2·e^2", "1 + e^2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vectors": [["1", "0"]]}, "three to six"),
        ({"order": [0, 1, 7]}, "numbers from 0 to 2"),
        ({"beta": "-1"}, "positive"),
        ({"beta": "n"}, "without letters"),
        ({"scale": "inf"}, "finite"),
        ({"noise": ["9^99", "0"]}, "at most 1000"),
        ({"beta": "999"}, "at most 500"),
        ({"mask": "causal("}, "causal"),
    ],
)
def test_attention_by_hand_rejects_invalid_requests(page, changes, message):
    request = {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], **changes}
    assert message in page.post("attention_by_hand", request)["error"]


def test_cost_actions_equal_the_predicted_cost(page):
    request = {"d_model": 48, "n_heads": 3, "n_layers": 2, "d_ff": 96, "vocab_size": 101, "tokens": 32, "batch": 5}
    result = page.post("cost", request)
    config = CostRequest(**request).config
    model = config.build()
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    expected = cost(config, tokens=32, batch=5, dtype=torch.bfloat16)
    assert result["flops"]["forward"] == expected.forward.value
    assert result["fits"] is True
    *progress, last = page.events("cost_growth", request)
    assert all("progress" in event for event in progress)
    rows = last["done"]["rows"]
    assert [row["tokens"] for row in rows] == [4, 8, 16, 32, 64, 128, 256]
    assert rows[3]["flops"] == expected.flops.value
    limit = page.post("largest_batch", request | {"memory": 0.001})

    def peak(tokens, batch):
        long_config = config.replace(max_len=1 << 20)
        return cost(long_config, tokens=tokens, batch=batch, dtype=torch.bfloat16).memory.peak.value

    assert peak(32, limit["batch"]) <= 0.001 * (1 << 30) < peak(32, limit["batch"] + 1)
    assert "divide" in page.post("cost", {"d_model": 7, "n_heads": 2})["error"]


def test_run_claim_equals_a_direct_run(page):
    entries = page.post("claims", {})["claims"]
    ids = {claim.id for claim in find(())}
    assert {entry["id"] for entry in entries} == ids
    name = "softmax-sums-to-one" if "softmax-sums-to-one" in ids else entries[0]["id"]
    result = page.post("run_claim", {"name": name, "seed": 3})
    expected = find([name])[0].run(3)
    assert (result["verdict"], result["evidence"]) == (expected.verdict, list(expected.evidence))
    assert "no claim is called" in page.post("run_claim", {"name": "../x"})["error"]


def test_grade_equals_grading_a_file(page):
    worksheet = page.post("worksheet", {"name": "sort-dedup-softmax"})
    solution = exercises.solve("sort-dedup-softmax")
    questions = [step for step in worksheet["steps"] if not step["is_given"]]
    assert all(cell == "" for step in questions for row in step["cells"] for cell in row)
    answers = {step["key"]: step["decimals"] or step["exact"] for step in questions[:3]}
    result = page.post("grade", {"name": "sort-dedup-softmax", "answers": answers})
    expected = exercises.grade_text(solution, "\n".join(f"{key} = {rows}" for key, rows in answers.items()))
    assert [step["right"] for step in result["steps"]] == [step.right for step in expected.steps]
    assert result["right"] is True
    answers[questions[0]["key"]][0][0] = "77"
    result = page.post("grade", {"name": "sort-dedup-softmax", "answers": answers})
    assert result["steps"][0]["marks"][0][0] == "wrong"
    assert "unknown exercise" in page.post("worksheet", {"name": "../../etc/passwd"})["error"]
    assert "not a matrix" in page.post("grade", {"name": "sort-dedup", "answers": {"q": "x"}})["error"]
