"""What the panels answer, each against something computed apart."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from clearhead import masks
from clearhead.analysis.cost import cost
from clearhead.course import exercises
from clearhead.course.claims import find
from clearhead.explorer.cost_panel import Sizes


def test_a_mask(page):
    found = page.post("mask", {"expression": "causal() & (window(3, 0) | every(4))", "n": 13})
    mask = masks.parse("causal() & (window(3, 0) | every(4))")
    dense = mask.dense(13)
    assert found["allowed"] == int(dense.sum())
    assert found["density"] == pytest.approx(float(dense.double().mean()))
    assert torch.equal(torch.tensor(found["cells"]) > 0, dense)
    assert found["empty"] is False
    assert found["price"]["planned"] > 0
    assert page.post("mask", {"expression": "causal() & nothing()"})["column"] == 12


def test_the_gallery_reads_back(page):
    found = page.post("gallery", {})
    assert len(found["gallery"]) > 10
    for one in found["gallery"]:
        masks.parse(one["expression"])
    assert [word["usage"] for word in found["words"]][2] == "window(before, after)"


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
def test_attention_by_hand(page, beta, mask, order, kind):
    vectors = [["1", "0"], ["-1/3", "2/3"], ["-1/2", "-3/4"]]
    ask = {
        "vectors": vectors,
        "beta": beta,
        "mask": mask,
        "order": order,
        "key": 2,
        "noise": ["1/8", "0"],
        "length": "3/2",
    }
    found = page.post("hand", ask)
    x = torch.tensor([[float(Fraction(cell)) for cell in row] for row in vectors], dtype=torch.float64)
    keys = x.clone()
    keys[2] = 1.5 * keys[2] + torch.tensor([0.125, 0.0])
    queries = x[order] if order else x
    scores = queries @ keys.T
    sharp = float(beta) if "/" not in beta else float(Fraction(beta))
    weights = (scores * min(sharp, 1e6)).masked_fill(~masks.parse(mask).dense(3), -torch.inf).softmax(-1)
    for name, value in (("scores", scores), ("weights", weights), ("outputs", weights @ x)):
        torch.testing.assert_close(torch.tensor(found[name]["values"], dtype=torch.float64), value)
    assert found["kind"].startswith(kind)
    if kind in ("identity", "permutation"):
        chosen = [vectors[i] for i in order or range(3)]  # fractions as they were typed
        assert found["outputs"]["exact"] == [[cell.replace("-", "−") for cell in row] for row in chosen]
    if not order:
        assert found["scores"]["exact"][0][2] == "−5/8"


def test_exact_numbers_over_their_sum(page):
    found = page.post("hand", {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], "beta": "2"})
    assert found["weights"]["exact"][0] == ["e^2", "1", "e^2"]
    assert found["sums"]["exact"][0] == ["1 + 2·e^2"]
    assert found["outputs"]["exact"][0] == ["2·e^2", "1 + e^2"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vectors": [["1", "0"]]}, "three to six"),
        ({"order": [0, 1, 7]}, "numbers from 0 to 2"),
        ({"beta": "-1"}, "positive"),
        ({"beta": "n"}, "without letters"),
        ({"length": "inf"}, "finite"),
        ({"noise": ["9^99", "0"]}, "at most 1000"),
        ({"beta": "999"}, "at most 500"),
        ({"mask": "causal("}, "causal"),
    ],
)
def test_what_hands_cannot_work(page, change, says):
    ask = {"vectors": [["1", "0"], ["0", "1"], ["1", "1"]], **change}
    assert says in page.post("hand", ask)["error"]


def test_costs(page):
    ask = {"d_model": 48, "n_heads": 3, "n_layers": 2, "d_ff": 96, "vocab_size": 101, "tokens": 32, "batch": 5}
    found = page.post("cost", ask)
    sizes = Sizes(**ask)
    model = sizes.config.build()
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    direct = cost(sizes.config, tokens=32, batch=5, dtype=torch.bfloat16)
    assert found["flops"]["forward"] == direct.forward.value
    assert found["fits"] is True
    *told, last = page.events("growth", ask)
    assert all("progress" in event for event in told)
    rows = last["done"]["rows"]
    assert [row["tokens"] for row in rows] == [4, 8, 16, 32, 64, 128, 256]
    assert rows[3]["flops"] == direct.flops.value
    room = page.post("fits", ask | {"memory": 0.001})

    def peak(tokens, batch):
        config = sizes.config.replace(max_len=1 << 20)
        return cost(config, tokens=tokens, batch=batch, dtype=torch.bfloat16).memory.peak.value

    assert peak(32, room["batch"]) <= 0.001 * (1 << 30) < peak(32, room["batch"] + 1)
    assert "divide" in page.post("cost", {"d_model": 7, "n_heads": 2})["error"]


def test_claims(page):
    listed = page.post("claims", {})["claims"]
    assert {one["id"] for one in listed} == set(page_claims())
    name = "softmax-sums-to-one" if "softmax-sums-to-one" in page_claims() else listed[0]["id"]
    found = page.post("claim", {"name": name, "seed": 3})
    direct = find([name])[0].run(3)
    assert (found["verdict"], found["evidence"]) == (direct.verdict, list(direct.evidence))
    assert "no claim is called" in page.post("claim", {"name": "../x"})["error"]


def page_claims():
    return {claim.id for claim in find(())}


def test_a_sheet_is_marked(page):
    found = page.post("sheet", {"name": "sort-dedup-softmax"})
    solved = exercises.solve("sort-dedup-softmax")
    asked = [step for step in found["steps"] if not step["given"]]
    assert all(cell == "" for step in asked for row in step["cells"] for cell in row)
    answers = {step["key"]: step["decimals"] or step["exact"] for step in asked[:3]}
    marked = page.post("marks", {"name": "sort-dedup-softmax", "answers": answers})
    direct = exercises.grade_text(solved, "\n".join(f"{key} = {rows}" for key, rows in answers.items()))
    assert [step["right"] for step in marked["steps"]] == [step.right for step in direct.steps]
    assert marked["right"] is True
    answers[asked[0]["key"]][0][0] = "77"
    marked = page.post("marks", {"name": "sort-dedup-softmax", "answers": answers})
    assert marked["steps"][0]["marks"][0][0] == "wrong"
    assert "there is no sheet" in page.post("sheet", {"name": "../../etc/passwd"})["error"]
    assert "no matrix" in page.post("marks", {"name": "sort-dedup", "answers": {"q": "x"}})["error"]
