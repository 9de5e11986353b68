"""The fuzzer finds planted bugs, shrinks them and repeats itself. Long runs are not part of the tests."""

from __future__ import annotations

import json
from math import inf

import numpy as np
import pytest
import torch

from clearhead.attention import attend
from clearhead.errors import StorageError
from clearhead.masks import Mask
from tests.support.attention_oracle import attention_by_hand
from tools import fuzz
from tools.fuzz_cases import KIND_WEIGHTS, CaseFailure, options
from tools.fuzz_cases.reference import Rounding, attention
from tools.fuzz_cases.sandbox import Budget


@pytest.mark.parametrize("kind", KIND_WEIGHTS)
def test_campaign_with_a_few_draws_of_each_kind_has_no_failures(kind):
    draws = 4 if kind in ("header", "option") else 12  # those run whole commands
    report = fuzz.fuzz(seed=3, draws=draws, only=kind)
    assert report["broken"] == []
    assert report["tried"] == {kind: draws}
    assert report["parts"]


def test_numeric_options_are_drawn_or_excluded_for_every_command():
    commands = options.numeric_options()
    assert set(commands) == set(options.ARGUMENTS) | set(options.EXCLUDED)
    assert {"--max-new-tokens", "--top-k", "--top-p", "--seed"} <= set(commands["generate"])


# The quiz exits with status 1 without answers.
@pytest.mark.parametrize("command", [name for name in options.ARGUMENTS if name != "claims quiz"])
def test_arguments_of_options_are_valid_without_a_numeric_option(command):
    assert fuzz.attempt("option", {"command": command, "options": []}) == [command, "exit 0"]


def test_campaign_reports_a_case_that_never_ends(monkeypatch):
    def loop(case):
        while True:
            pass

    monkeypatch.setattr("tools.fuzz_cases.headers.check", loop)
    monkeypatch.setattr("tools.fuzz_cases.headers.BUDGET", Budget(cpu_seconds=1, memory=1 << 28))
    monkeypatch.setattr(fuzz, "MAX_SHRINK_CHECKS", 0)
    (failure,) = fuzz.fuzz(seed=3, draws=1, only="header")["broken"]
    assert failure["message"] == "OverBudgetError: used more than 1 s of CPU time"


def test_drawn_repeats_for_the_same_seed():
    assert fuzz.draw_case(5, 17, "cpu") == fuzz.draw_case(5, 17, "cpu")
    assert fuzz.draw_case(5, 17, "cpu") != fuzz.draw_case(6, 17, "cpu")
    kinds = {fuzz.draw_case(1, n, "cpu")[0] for n in range(160)}
    assert kinds == set(KIND_WEIGHTS)


def test_campaign_finds_and_shrinks_a_planted_attention_bug(monkeypatch, capsys):
    """One implementation is wrong by a tenth for five queries or more."""

    def wrong(q, *arguments, impl, **options):
        out = attend(q, *arguments, impl=impl, **options)
        return out * 1.1 if impl == "auto" and q.shape[-2] >= 5 else out

    monkeypatch.setattr("tools.fuzz_cases.attention.attend", wrong)
    assert fuzz.main(["--draws", "12", "--only", "attend", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "CaseFailure: auto: out is" in printed
    line = next(line for line in printed.splitlines() if "tools.fuzz import check" in line)
    call = line.partition("check; ")[2].rstrip('"')
    with pytest.raises(CaseFailure, match="auto: out is"):
        eval(call, {"check": fuzz.check, "inf": inf})
    case = eval(call.removeprefix("check"), {"inf": inf})[1]
    assert case["T"] == 5
    assert (case["lead"], case["K"], case["groups"], case["mask"], case["bias"]) == ([1], 1, 1, None, None)
    monkeypatch.undo()
    fuzz.check("attend", case)


def test_campaign_finds_and_shrinks_a_planted_mask_bug(monkeypatch):
    count = Mask.count
    monkeypatch.setattr(Mask, "count", lambda mask, *sizes, **at: count(mask, *sizes, **at) + ("window" in str(mask)))
    (failure,) = fuzz.fuzz(seed=1, draws=60, only="mask")["broken"]
    assert failure["message"].startswith("CaseFailure: count gives")
    assert failure["case"]["spec"] == ["window", 0, 0]


def test_attempt_with_an_unexpected_error_of_a_reader_fails(monkeypatch):
    def careless(folder):
        try:
            return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise StorageError("not text") from error

    monkeypatch.setitem(fuzz.kinds()["file"].READERS, "symbols/tokenizer.json", careless)
    case = {"file": "symbols/tokenizer.json", "damage": [["turn", 0, 1], ["cut", 30, 7]]}
    signature, message = fuzz.attempt("file", case)
    assert message.startswith("JSONDecodeError")
    small, _ = fuzz.shrink("file", case, (signature, message))
    assert len(small["damage"][0]) == 3
    assert sum(n for _, n, m in small["damage"] for n in (n, m)) < 38


def test_main_with_json_prints_one_document(capsys):
    assert fuzz.main(["--draws", "3", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draws"] == 3


def test_main_without_a_limit_exits(capsys):
    with pytest.raises(SystemExit):
        fuzz.main([])
    assert "expected --seconds N or --draws N" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_oracle_matches_loops_and_finite_differences(temperature):
    """Values are compared with scalar loops, gradients with differences of those values."""
    g = np.random.default_rng(0)
    q, k, v = g.normal(size=(1, 2, 3, 5)), g.normal(size=(1, 1, 7, 5)), g.normal(size=(1, 1, 7, 2))
    up, bias = g.normal(size=(1, 2, 3, 2)), g.normal(size=(1, 2, 3, 7))
    allowed = g.random((1, 2, 3, 7)) < 0.6
    allowed[0, 0, 1] = False
    no_rounding = Rounding(0.0, 0.0, 0.0)

    def run(**changed):
        inputs = {"q": q, "k": k, "v": v, "bias": bias} | changed
        exact = attention(
            inputs["q"], inputs["k"], inputs["v"], up, allowed, inputs["bias"],
            scale=0.4, temperature=temperature, rounding=no_rounding,
        )  # fmt: skip
        return exact.values

    tensors = [torch.from_numpy(x[0]) for x in (q, k, v, allowed)]
    expected = attention_by_hand(*tensors, scale=0.4, temperature=temperature, bias=torch.from_numpy(bias[0]))
    np.testing.assert_allclose(run()["out"][0], expected.numpy(), rtol=1e-12, atol=1e-12)
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        for index in [(0, 0, 0, 0), (0, x.shape[1] - 1, 2, 1)]:
            step = np.zeros_like(x)
            step[index] = 1e-6
            slope = ((run(**{name: x + step})["out"] - run(**{name: x - step})["out"]) * up).sum() / 2e-6
            assert run()["d" + name][index] == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("query", "scale", "steps"), [(64.0, 1 / 32, 4), (1e-3, 32.0, 32)])
def test_oracle_bounds_include_the_smallest_step_times_its_factor(query, scale, steps):
    """The step of a weight is multiplied by queries of 64, the step of a product by the scale that follows it."""
    q, k, v, up = np.full((1, 1, 1, 1), query), *(np.ones((1, 1, n, 1)) for n in (2, 2, 1))
    allowed, bias = np.ones((1, 1, 1, 2), dtype=bool), np.zeros((1, 1, 1, 2))
    rounding = Rounding(unit=0.0, statistics=0.0, least=5e-324)
    exact = attention(q, k, v, up, allowed, bias, scale=scale, temperature=1.0, rounding=rounding)
    assert (exact.bounds["dk"] >= steps * 5e-324).all()
