"""Memory fits, invalid arguments, masks, output, and the results file with its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.cost import Case, predict_again, read, row_of, summary, worst
from clearhead.analysis.cost import AttentionSizes, cost, preset
from clearhead.analysis.cost.fit import largest_fit, parse_bytes
from clearhead.analysis.cost.machine import Machine
from clearhead.errors import ConfigError, DtypeError, ImplementationError, ShapeError, StorageError
from clearhead.masks import causal, padding, window
from clearhead.models import tiny_decoder, tiny_vision
from clearhead.models.baselines.linear import LogisticRegressionConfig

RESULTS = Path(__file__).parents[3] / "docs" / "results"
MACHINE = Machine("test", "cpu", {"float32": 1e10}, 1e10, 1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_largest_fit_batch_is_maximal(training):
    model = preset("gpt2").replace(n_layers=1)
    best = largest_fit(model, parse_bytes("8GiB"), tokens=1000, training=training)
    assert best.max_batch is not None
    peaks = [
        cost(model, tokens=1000, batch=best.max_batch + more, training=training).memory.peak.value for more in (0, 1)
    ]
    assert peaks[0] <= 8 * 2**30 < peaks[1]


def test_largest_fit_length_is_maximal():
    model = preset("base").replace(n_encoder_layers=1, n_decoder_layers=1)
    best = largest_fit(model, parse_bytes("4GiB"), tokens=100, batch=4, training=True)
    assert best.max_tokens is not None
    assert not best.is_model_limit
    peaks = [cost(model, tokens=best.max_tokens + more, batch=4, training=True).memory.peak.value for more in (0, 1)]
    assert peaks[0] <= 4 * 2**30 < peaks[1]


def test_largest_fit_length_may_be_model_limit():
    best = largest_fit(preset("gpt2").replace(n_layers=1), parse_bytes("200GiB"), tokens=100)
    assert (best.max_tokens, best.is_model_limit) == (1024, True)


def test_largest_fit_too_little_memory_returns_zero():
    assert largest_fit(preset("gpt2").replace(n_layers=1), parse_bytes("1MiB"), tokens=10).max_batch == 0


def test_largest_fit_vision_model_returns_no_length():
    best = largest_fit("vit-small", parse_bytes("2GiB"))
    assert best.max_tokens is None
    assert best.max_batch is not None
    assert best.max_batch > 1


@pytest.mark.parametrize(
    ("text", "n"), [("24GiB", 24 * 2**30), ("1.5 kb", 1500), ("7", 7), ("2G", 2**31), ("512MB", 512 * 10**6)]
)
def test_parse_bytes_valid_text_returns_bytes(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-3GiB", "0.1b"])
def test_parse_bytes_invalid_text_raises_config_error(text):
    with pytest.raises(ConfigError, match="memory"):
        parse_bytes(text)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cost("gpt3", tokens=5), ConfigError, "unknown preset 'gpt3'; did you mean 'gpt2'?"),
        (lambda: preset("zzz"), ConfigError, "unknown preset 'zzz'; known: base, big"),
        (lambda: cost("gpt2"), ConfigError, "tokens is missing"),
        (lambda: cost("gpt2", tokens=-3), ConfigError, "tokens is -3; expected a whole number of at least 1"),
        (lambda: cost("gpt2", tokens=3.5), ConfigError, "tokens is 3.5; expected a whole number"),
        (lambda: cost("gpt2", tokens=3, batch=0), ConfigError, "batch is 0; expected a whole number of at least 1"),
        (lambda: cost("base", tokens=(3, 4, 5)), ConfigError, "expected one number, or two"),
        (lambda: cost("base", tokens=(3, 0)), ConfigError, "tokens is 0; expected a whole number of at least 1"),
        (lambda: cost("gpt2", tokens=(3, 4)), ConfigError, "Decoder takes one sequence: expected one number"),
        (lambda: cost("bert-base", tokens=(3, 4)), ConfigError, "Encoder takes one sequence"),
        (
            lambda: cost("gpt2", tokens=1025),
            ShapeError,
            "1025 tokens are more than the 1024 learned positions",
        ),
        (
            lambda: cost("vit-small", tokens=5),
            ShapeError,
            "has 197 tokens per image, got tokens=5; change image_size",
        ),
        (
            lambda: cost("vit-small", mask=causal()),
            ConfigError,
            "VisionTransformer does not take a mask|Vision does not take a mask",
        ),
        (lambda: cost(LogisticRegressionConfig(n_features=3), tokens=5), ShapeError, "does not take a sequence"),
        (lambda: cost("gpt2", tokens=5, dtype=torch.int64), DtypeError, "expected a floating-point dtype"),
        (
            lambda: cost("gpt2", tokens=5, impl="quick"),
            ImplementationError,
            'impl="quick" is unknown; choose one of',
        ),
        (
            lambda: cost(3, tokens=5),
            ConfigError,
            "got a int; expected a configuration, a module, or the name of a preset",
        ),
        (
            lambda: AttentionSizes(10, 3),
            ConfigError,
            "d_model is 10 and n_heads is 3; expected a multiple of n_heads",
        ),
        (lambda: AttentionSizes(-8, 2), ConfigError, "d_model is -8"),
        (
            lambda: cost("gpt2", tokens=5, activation_checkpointing="all"),
            ConfigError,
            "activation_checkpointing is 'all'",
        ),
        (
            lambda: cost(LogisticRegressionConfig(n_features=3), training=True, activation_checkpointing=True),
            ConfigError,
            "needs repeated layers in a list, and LogisticRegression has none",
        ),
        (
            lambda: Machine.read("h900"),
            ConfigError,
            "device is 'h900'; expected cpu, cuda, a bundled machine .h200.",
        ),
        (
            lambda: cost("gpt2", tokens=5, dtype=torch.float16).time(Machine.read("h200")),
            ConfigError,
            "NVIDIA H200 was measured in float32, bfloat16, not in float16",
        ),
        (lambda: cost("gpt2", tokens=5, device="tpu"), ConfigError, "device is 'tpu'; expected 'cuda' or 'cpu'"),
        (lambda: cost("gpt2", tokens=5, device=None), ConfigError, "device is 'None'; expected 'cuda' or 'cpu'"),
        (lambda: cost("gpt2", tokens=5, training="yes"), ConfigError, "training is 'yes'; expected True or False"),
        (
            lambda: cost(nn.ReLU(), inputs=torch.zeros(2, 3), training=True),
            ConfigError,
            "ReLU has no parameter that requires gradients; omit training",
        ),
        (lambda: cost(nn.Linear(3, 2), inputs=()), ConfigError, "missing 1 required positional argument: 'input'"),
        (
            lambda: cost(nn.Sequential(nn.LazyLinear(2)), inputs=torch.zeros(2, 3)),
            ConfigError,
            "the size of 0.weight in Sequential is unknown until its first call",
        ),
        (
            lambda: cost(torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3)), inputs=torch.zeros(2, 3)),
            ConfigError,
            "Linear is TorchScript|TopLevelTracedModule is TorchScript",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_cost_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")):
        call()


def test_cost_of_model_equals_cost_of_config():
    config = tiny_decoder()
    assert cost(config.build(), tokens=13).to_dict() == cost(config, tokens=13).to_dict()


def test_cost_inputs_on_another_device_give_the_same_cost():
    plain, elsewhere = (cost(nn.Linear(5, 3), inputs=[torch.empty(2, 5, device=d)]) for d in ("cpu", "meta"))
    assert plain.forward.value == elsewhere.forward.value == 2 * 2 * 5 * 3


def test_cost_padding_mask_counts_pairs_of_the_batch():
    lengths = torch.tensor([3, 7, 11])
    prediction = cost(tiny_decoder(), tokens=11, batch=3, mask=padding(lengths))
    assert prediction.pairs is not None
    assert prediction.pairs.allowed.value == int((causal() & padding(lengths)).dense(11).sum())
    assert prediction.pairs.dense.value == 3 * 11 * 11


def test_cost_sparse_impl_charges_computed_pairs():
    mask = causal() & window(16, 0)
    prediction = cost("gpt2", tokens=1000, mask=window(16, 0), impl="sparse")
    dense = cost("gpt2", tokens=1000, mask=window(16, 0), impl="sdpa")
    assert prediction.pairs is not None
    assert prediction.pairs.mask == mask
    assert prediction.pairs.allowed.value == mask.count(1000) < prediction.pairs.computed.value < 1000 * 1000
    saved = 4 * 768 * 12 * (1000 * 1000 - prediction.pairs.computed.value)
    assert dense.forward.value - prediction.forward.value == saved


def test_cost_auto_impl_follows_attend():
    sparse = cost("tiny-decoder", tokens=61, mask=window(3, 0))
    assert sparse.pairs is not None
    assert not sparse.pairs.runs_plan  # too small to plan for
    layer = AttentionSizes(64, 4)
    long = cost(layer, tokens=8192, mask=causal() & window(64, 0))
    assert long.pairs is not None
    assert long.pairs.runs_plan
    assert long.pairs.computed.value == long.pairs.planned < long.pairs.dense.value / 10


@pytest.mark.parametrize(("device", "dtype", "rows"), [("cpu", torch.float32, 64), ("cuda", torch.bfloat16, 64)])
def test_cost_sparse_mask_charges_plan_of_device(device, dtype, rows):
    """A window of 3 before a block of `rows` queries: each block computes its rows and 3 more keys."""
    prediction = cost(AttentionSizes(64, 1), tokens=8192, mask=causal() & window(3, 0), dtype=dtype, device=device)
    assert prediction.pairs is not None
    assert prediction.pairs.planned == 8192 * (rows + 3) - 3 * rows  # the first block has no keys before it


def test_cost_text_html_and_json():
    prediction = cost("tiny-decoder", tokens=13, training=True)
    assert "blocks.*.feed_forward.up" in str(prediction)
    assert json.loads(json.dumps(prediction.to_dict()))["parameters"]["value"] == 30752
    assert prediction.formulas()["parameters"] == "M*(12*L*M + 13*L + N + V + 2)"
    assert "M" in prediction.formulas(latex=True)["parameters"]
    html = prediction._repr_html_()
    assert "blocks.*.feed_forward.up</td>" in html
    assert ">30,752</td>" in html  # the total, right-aligned
    assert ">peak</td>" in html


@pytest.fixture(scope="module")
def document():
    rows = [row_of(Case("tiny-vision", 3, training=False), MACHINE, seconds=0.01)]
    return {"format": 1, "machine": MACHINE.to_dict(), "versions": {"torch": torch.__version__}, "rows": rows}


def test_summary_contains_row_per_group(document, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document))
    assert summary(read(path)).count("`tiny-vision` | float32, inference") == 1
    row = document["rows"][0]
    assert f"| {tiny_vision().grid[0] ** 2 + 1} | {row['ratio']['memory']:.2f} |" in summary(read(path))
    assert worst(document)["memory"] == abs(row["ratio"]["memory"] - 1)
    assert abs(row["ratio"]["memory"] - 1) < 0.05


def test_predict_again_same_machine_is_unchanged(document):
    assert predict_again(document) == document


@pytest.mark.measured
def test_predict_again_gpu_results_stay_within_bounds():
    """Today's predictions stay within the bounds of the stored measurements."""
    document = predict_again(read(RESULTS / "cost.json"))
    errors = worst(document)
    assert errors["memory"] <= 0.05
    assert errors["time"] <= 0.20


def test_read_invalid_results_raises_storage_error(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(StorageError, match="does not contain cost results of format 1"):
        read(tmp_path / "bad.json")
    with pytest.raises(StorageError, match="cannot be read as results"):
        read(tmp_path / "missing.json")
