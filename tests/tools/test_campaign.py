"""The campaign finds what is wrong, makes it small, and repeats itself. A long one is no part of the tests."""

from __future__ import annotations

import json
from math import inf

import numpy as np
import pytest
import torch

from clearhead.attention import attend
from clearhead.errors import StorageError
from clearhead.masks import Mask
from tests.attention.oracle import attention_by_hand
from tools import campaign
from tools.trials import SHARES, Broken
from tools.trials.oracle import Rounding, attention


def test_a_few_draws_of_every_kind_find_nothing():
    for kind in SHARES:
        found = campaign.campaign(seed=3, draws=12, only=kind)
        assert found["broken"] == []
        assert found["tried"] == {kind: 12}
        assert found["parts"]


def test_a_draw_is_the_same_again():
    assert campaign.drawn(5, 17, "cpu") == campaign.drawn(5, 17, "cpu")
    assert campaign.drawn(5, 17, "cpu") != campaign.drawn(6, 17, "cpu")
    kinds = {campaign.drawn(1, n, "cpu")[0] for n in range(80)}
    assert kinds == set(SHARES)


def test_a_planted_fault_is_found_and_shrunk(monkeypatch, capsys):
    """One way is off by a tenth where there are five queries or more."""

    def wrong(q, *arguments, impl, **options):
        out = attend(q, *arguments, impl=impl, **options)
        return out * 1.1 if impl == "auto" and q.shape[-2] >= 5 else out

    monkeypatch.setattr("tools.trials.attention.attend", wrong)
    assert campaign.main(["--draws", "12", "--only", "attend", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "Broken: auto: out is" in printed
    line = next(line for line in printed.splitlines() if "tools.campaign import check" in line)
    call = line.partition("check; ")[2].rstrip('"')
    with pytest.raises(Broken, match="auto: out is"):
        eval(call, {"check": campaign.check, "inf": inf})
    case = eval(call.removeprefix("check"), {"inf": inf})[1]
    assert case["T"] == 5
    assert (case["lead"], case["K"], case["groups"], case["mask"], case["bias"]) == ([1], 1, 1, None, None)
    monkeypatch.undo()
    campaign.check("attend", case)


def test_a_planted_fault_of_a_mask_is_found_and_shrunk(monkeypatch):
    right = Mask.count
    monkeypatch.setattr(Mask, "count", lambda mask, *sizes, **at: right(mask, *sizes, **at) + ("window" in str(mask)))
    (found,) = campaign.campaign(seed=1, draws=60, only="mask")["broken"]
    assert found["message"].startswith("Broken: count gives")
    assert found["case"]["spec"] == ["window", 0, 0]


def test_an_error_of_another_kind_breaks_a_file(monkeypatch):
    def careless(folder):
        try:
            return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise StorageError("not text") from error

    monkeypatch.setitem(campaign.kinds()["file"].READERS, "symbols/tokenizer.json", careless)
    case = {"file": "symbols/tokenizer.json", "damage": [["turn", 0, 1], ["cut", 30, 7]]}
    word, message = campaign.attempt("file", case)
    assert message.startswith("JSONDecodeError")
    small = campaign.shrunk("file", case, word)
    assert len(small["damage"][0]) == 3
    assert sum(n for _, n, m in small["damage"] for n in (n, m)) < 38


def test_json_is_one_document(capsys):
    assert campaign.main(["--draws", "3", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draws"] == 3


def test_it_must_be_told_when_to_stop(capsys):
    with pytest.raises(SystemExit):
        campaign.main([])
    assert "say when to stop" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_the_oracle_is_the_definition(temperature):
    """Values against loops over single numbers, gradients against differences of those values."""
    g = np.random.default_rng(0)
    q, k, v = g.normal(size=(1, 2, 3, 5)), g.normal(size=(1, 1, 7, 5)), g.normal(size=(1, 1, 7, 2))
    up, bias = g.normal(size=(1, 2, 3, 2)), g.normal(size=(1, 2, 3, 7))
    allowed = g.random((1, 2, 3, 7)) < 0.6
    allowed[0, 0, 1] = False
    exact = Rounding(0.0, 0.0, 0.0)

    def run(**changed):
        given = {"q": q, "k": k, "v": v, "bias": bias} | changed
        made = attention(
            given["q"], given["k"], given["v"], up, allowed, given["bias"],
            scale=0.4, temperature=temperature, rounding=exact,
        )  # fmt: skip
        return made.values

    tensors = [torch.from_numpy(x[0]) for x in (q, k, v, allowed)]
    wanted = attention_by_hand(*tensors, scale=0.4, temperature=temperature, bias=torch.from_numpy(bias[0]))
    np.testing.assert_allclose(run()["out"][0], wanted.numpy(), rtol=1e-12, atol=1e-12)
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        for place in [(0, 0, 0, 0), (0, x.shape[1] - 1, 2, 1)]:
            step = np.zeros_like(x)
            step[place] = 1e-6
            slope = ((run(**{name: x + step})["out"] - run(**{name: x - step})["out"]) * up).sum() / 2e-6
            assert run()["d" + name][place] == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("query", "scale", "steps"), [(64.0, 1 / 32, 4), (1e-3, 32.0, 32)])
def test_the_least_step_is_allowed_for_in_what_it_is_multiplied_by(query, scale, steps):
    """A weight's, by queries of 64: a product begun with a small scale would round it to none. A product's, by a large
    scale that comes after it."""
    q, k, v, up = np.full((1, 1, 1, 1), query), *(np.ones((1, 1, n, 1)) for n in (2, 2, 1))
    allowed, bias = np.ones((1, 1, 1, 2), dtype=bool), np.zeros((1, 1, 1, 2))
    rounding = Rounding(unit=0.0, statistics=0.0, least=5e-324)
    found = attention(q, k, v, up, allowed, bias, scale=scale, temperature=1.0, rounding=rounding)
    assert (found.bounds["dk"] >= steps * 5e-324).all()
