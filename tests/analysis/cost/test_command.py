"""`clearhead cost` in process."""

from __future__ import annotations

import json

import pytest

from benchmarks import cost as catalogue
from benchmarks.cost import Case, read, worst
from clearhead.analysis.cost import cost
from clearhead.cli.output import console
from tests.support.terminal import use_terminal


def test_command_attention_layer_prints_parts(run):
    status, out, error = run("--d-model", "512", "--n-heads", "8", "--tokens", "1000")
    assert status == 0, error
    assert "1,048,576" in out
    assert "1,000,000 attention weights per head" in out
    for name, n in (("q_proj", 524_288_000), ("scores", 1_024_000_000), ("weighted sum", 1_024_000_000)):
        assert any(name in line and f"{n:,}" in line for line in out.splitlines())


def test_command_input_options_describe_unknown_module(run, tmp_path, monkeypatch):
    (tmp_path / "mine_to_price.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))\n"
        "def wide():\n    return nn.Sequential(nn.Linear(12, 8))\n"
        "def no_parameters():\n    raise ValueError('no sizes')\n"
        "class Failing(nn.Module):\n    def forward(self, x):\n        raise KeyError('no such key')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, error = run("mine_to_price:small", "--vocab-size", "50", "--tokens", "7", "--json")
    assert status == 0, error
    assert json.loads(out)["flops"]["forward"]["value"] == 2 * 7 * 8 * 50
    status, out, error = run("mine_to_price:wide", "--input-shape", "3,12", "--json")
    assert status == 0, error
    assert json.loads(out)["flops"]["forward"]["value"] == 2 * 3 * 12 * 8
    for name, problem in (
        (
            "no_parameters",
            "mine_to_price:no_parameters could not be called without arguments: ValueError: no sizes (at ",
        ),
        ("Failing", "the module failed with these inputs: KeyError: 'no such key' (at "),
    ):
        status, _, error = run(f"mine_to_price:{name}", "--input-dim", "3", "--tokens", "7")
        assert (status, error.count("\n")) == (1, 1)
        assert error.startswith(f"clearhead: {problem}{tmp_path / 'mine_to_price.py'}:")
    status, _, error = run("mine_to_price:small", "--vocab-size", "50", "--input-dim", "3")
    assert (status, error[:45]) == (1, "clearhead: a module takes one kind of input; ")


def test_command_narrow_terminal_prints_all_digits(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(console, "width", 60)  # the console may have another width
    status, out, error = run("gpt2", "--tokens", "1024", "--batch", "4", "--train")
    assert status == 0, error
    prediction = cost("gpt2", tokens=1024, batch=4, training=True)
    assert "…" not in out
    words = out[out.index("total") :].split()  # on separate lines if one line is too narrow
    assert {f"{prediction.forward.value:,}", f"{prediction.backward.value:,}"} <= set(words)


def test_command_json_contains_prediction_limit_and_measurement(run):
    status, out, error = run(
        "tiny-decoder", "--tokens", "13", "--batch", "3", "--train", "--json", "--memory-limit", "1MiB", "--measure"
    )
    assert status == 0, error
    document = json.loads(out)
    predicted = cost("tiny-decoder", tokens=13, batch=3, training=True, device="cpu")
    assert document["parameters"]["value"] == predicted.parameters.value
    assert document["memory"]["peak"]["value"] == predicted.memory.peak.value
    assert document["memory_limit"]["max_batch"] >= 1
    assert document["measured"]["ratio"]["memory"] == pytest.approx(1.0, rel=0.05)


def test_benchmark_cost_writes_row_per_case(benchmarks_cli, tmp_path, monkeypatch):
    cases = tuple(Case("tiny-vision", 2, training=training) for training in (True, False))
    monkeypatch.setattr(catalogue, "cases", lambda scale: cases)
    result = benchmarks_cli("cost", "--device", "cpu", "--out", tmp_path / "cost.json")
    assert result.code == 0, result.err
    document = read(tmp_path / "cost.json")
    assert [row["training"] for row in document["rows"]] == [True, False]
    for row in document["rows"]:
        assert row["ratio"]["memory"] == pytest.approx(1.0, rel=0.05)
        assert f"{row['ratio']['time']:6.3f}" in result.out
    assert f"largest error of memory {100 * worst(document)['memory']:.1f} %" in result.out


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ((), "running on tensors without data"),
        (("--formulas",), "finding formulas"),
        (("--memory-limit", "1MiB"), "finding the largest batch and length"),
        (("--measure",), "measuring"),
    ],
)
def test_command_in_a_terminal_shows_what_it_is_doing(run, monkeypatch, options, label):
    arguments = ("tiny-decoder", "--tokens", "7", *options)
    assert label not in run(*arguments)[1]  # of a pipe
    use_terminal(monkeypatch)
    status, out, error = run(*arguments)
    assert status == 0, error
    assert label in out[: out.index("tiny-decoder")]  # the last label of the bar, which is erased before the result
    assert label not in run(*arguments, "--json")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bass", "--tokens", "5"), "clearhead: unknown preset 'bass'; did you mean 'base'?\n"),
        (("base", "--tokens", "-5"), "clearhead: tokens is -5; expected a whole number of at least 1\n"),
        (
            ("--d-model", "512", "--n-heads", "7", "--tokens", "5"),
            "clearhead: MultiHeadAttention: d_model is 512 and n_heads is 7",
        ),
        ((":x", "--tokens", "5"), "clearhead: ':x' does not name a Python module; expected package.module:factory"),
        (("gpt2",), "clearhead: tokens is missing; Decoder needs a length, such as tokens=1000 (or --tokens 1000)"),
        ((), "clearhead: give a model, such as base, or the sizes of one attention layer"),
        (("gpt2", "--tokens", "5", "--memory-limit", "much"), "clearhead: cannot parse memory size 'much'"),
        (("base", "--tokens", "5", "--n-kv-heads", "2"), "clearhead: got a model and the sizes of a layer"),
        (("base", "--tokens", "5", "--bias"), "clearhead: got a model and the sizes of a layer"),
        (
            ("gpt2", "--tokens", "5", "--source-length", "3"),
            "clearhead: tokens is (3, 5); Decoder takes one sequence",
        ),
        (("vit-small", "--source-length", "3"), "clearhead: --source-length needs --tokens"),
        (("base", "--tokens", "5", "--gpus", "8"), "clearhead: the cost per GPU needs --gpus and --par"),
        (
            ("base", "--tokens", "5", "--interconnect", "450GB/s"),
            "clearhead: the cost per GPU needs --gpus and --parallel",
        ),
        (("--measure", "--train"), "clearhead: --measure needs a model"),
        (("--measure", "--mask", "causal()"), "clearhead: --measure needs a model"),
    ],
)
def test_command_invalid_options_print_one_line(run, arguments, message):
    status, _, error = run(*arguments)
    assert status == 1
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_command_machine_and_gpus_print_time_and_share(run):
    status, out, error = run(
        *("tiny-decoder", "--tokens", "64", "--train", "--device", "h200"),
        *("--gpus", "8", "--parallel", "fsdp", "--interconnect", "450GB/s"),
    )
    assert status == 0, error
    assert "the device waiting for the host" in out
    assert "ms communication" in out
