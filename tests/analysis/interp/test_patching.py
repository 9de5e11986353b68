"""Patching and ablation, compared with forward hooks; invalid arguments of all methods."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.nn.positions import LearnedPositions
from tests.analysis.interp.subjects import (
    CASES,
    PATCHING_CASES,
    S,
    T,
    V,
    change_middle_token,
    decoder,
    encoder_decoder,
    forward_hooks,
    gpt2,
    ids,
    record_with_hooks,
    rounding,
    run_logits,
)


def logits_with_output_changed(model, model_args, path, change):
    """Return the logits with a module's output changed by a forward hook."""

    def hook(module, args, output):
        x = (output[0] if isinstance(output, tuple) else output).clone()
        change(x)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    with forward_hooks((model.get_submodule(path), hook)):
        return run_logits(model, model_args)


@pytest.mark.parametrize("case", PATCHING_CASES, indirect=True)
def test_patch_with_same_input_changes_nothing(case):
    _, model, model_args, _ = case
    for granularity in ("position", "head", "module"):
        grid = analysis.patch(model, model_args, model_args, granularity=granularity, batch=1)
        assert (grid.values == grid.baseline).all()  # to the bit
        assert grid.baseline == grid.clean
    at_once = analysis.patch(model, model_args, model_args)
    torch.testing.assert_close(
        at_once.values, at_once.values * 0 + at_once.baseline, rtol=0, atol=rounding(at_once.baseline)
    )


@pytest.mark.parametrize("case", PATCHING_CASES, indirect=True)
def test_patch_blocks_equals_forward_hooks(case):
    _, model, model_args, corrupted = case
    metric = analysis.LogitMetric(token=3, baseline=2)
    grid = analysis.patch(model, model_args, corrupted, metric)
    _, clean, logits = record_with_hooks(model, grid.rows, model_args)
    assert grid.clean == metric(logits)
    assert grid.baseline == metric(run_logits(model, corrupted))
    assert grid.clean != grid.baseline
    for i, path in enumerate(grid.rows):
        for position in (0, grid.columns[-1] // 2, grid.columns[-1]):

            def change(x, path=path, position=position):
                x[:, position] = clean[path][:, position]

            expected = metric(logits_with_output_changed(model, corrupted, path, change))
            assert float(grid.values[i, position]) == pytest.approx(expected, abs=rounding(expected))
    torch.testing.assert_close(grid.restored, (grid.values - grid.baseline) / (grid.clean - grid.baseline))
    by_module = analysis.patch(model, model_args, corrupted, metric, granularity="module")
    assert by_module.values[-1, 0] == pytest.approx(grid.clean, abs=rounding(grid.clean))


@pytest.mark.parametrize("name", ["pre-norm", "encoder-decoder", "gpt2", "llama"])
def test_patch_and_ablate_heads_equal_forward_hooks(name):
    """Patch, zero and mean-ablate each head at the input of its output projection."""
    model, model_args, change = CASES[name]()
    corrupted, metric = change(model_args), analysis.LogitMetric(token=3)
    grids = {
        "patch": analysis.patch(model, model_args, corrupted, metric, granularity="head", batch=4),
        "zero": analysis.ablate(model, model_args, metric),
        "mean": analysis.ablate(model, model_args, metric, to="mean"),
    }
    ending = "c_proj" if name == "gpt2" else "o_proj"
    inputs, _, _ = record_with_hooks(model, [f"{path}.{ending}" for path in grids["patch"].rows], model_args)
    for i, path in enumerate(grids["patch"].rows):
        projection, clean = model.get_submodule(f"{path}.{ending}"), inputs[f"{path}.{ending}"]
        for head in (0, 5):
            part = slice(4 * head, 4 * head + 4)
            replacements = {
                "patch": clean[..., part],
                "zero": torch.zeros_like(clean[..., part]),
                "mean": clean[..., part].mean((0, 1), keepdim=True),
            }
            for kind, grid in grids.items():

                def replace_head(module, args, value=replacements[kind], part=part):
                    x = args[0].clone()
                    x[..., part] = value
                    return (x,)

                handle = projection.register_forward_pre_hook(replace_head)
                expected = metric(run_logits(model, corrupted if kind == "patch" else model_args))
                handle.remove()
                assert float(grid.values[i, head]) == pytest.approx(expected, abs=rounding(expected)), (
                    kind,
                    path,
                    head,
                )
    plain = grids["zero"].baseline
    assert plain == metric(run_logits(model, model_args))
    torch.testing.assert_close(grids["zero"].change, grids["zero"].values - plain)


def test_patch_of_some_positions_equals_those_columns_of_the_whole_grid():
    model, model_args = decoder(), ids()
    corrupted, metric = change_middle_token(model_args), analysis.LogitMetric(token=3)
    whole = analysis.patch(model, model_args, corrupted, metric)
    calls = []

    def counted(logits):
        calls.append(1)
        return metric(logits)

    some = analysis.patch(model, model_args, corrupted, counted, positions=[T - 1, 2])
    assert some.columns == (T - 1, 2)
    assert len(calls) == 2 + 2 * len(whole.rows)  # the two inputs, and a run per cell
    torch.testing.assert_close(some.values, whole.values[:, [T - 1, 2]])
    assert analysis.patch(model, model_args, corrupted, metric, positions=[]).values.shape == (len(whole.rows), 0)
    with pytest.raises(ConfigError, match=f"position is {T}; expected 0 to {T - 1}"):
        analysis.patch(model, model_args, corrupted, metric, positions=[T])
    with pytest.raises(ConfigError, match="granularity='position'"):
        analysis.patch(model, model_args, corrupted, metric, positions=[1], granularity="head")


def test_patch_accepts_module_pattern_and_custom_metric():
    model, model_args = encoder_decoder(), (ids(S), ids())
    corrupted = (change_middle_token(model_args[0]), model_args[1])
    calls = []

    def probability(logits):
        calls.append(logits.shape)
        return logits[0, -1].softmax(-1)[3]

    grid = analysis.patch(model, model_args, corrupted, probability, modules="encoder.blocks.*", batch=3)
    assert grid.rows == ("encoder.blocks.0", "encoder.blocks.1")
    assert grid.values.shape == (2, S)
    assert set(calls) == {(1, T, V)}
    assert float(grid.values.std()) > 0
    out = analysis.ablate(model, model_args, modules="decoder.blocks.*.feed_forward", granularity="module")
    assert out.values.shape == (2, 1)
    hand = logits_with_output_changed(model, model_args, "decoder.blocks.1.feed_forward", lambda x: x.zero_())
    assert float(out.values[1, 0]) == pytest.approx(float(hand[0, -1, run_logits(model, model_args)[0, -1].argmax()]))
    assert json.loads(json.dumps(out.to_dict()))["clean"] is None
    assert "Ablation of each module" in str(out)


@pytest.mark.parametrize(("name", "parts"), [("pre-norm", ("attention", "feed_forward")), ("gpt2", ("attn", "mlp"))])
def test_ablate_modules_covers_residual_stream_contributors(name, parts):
    model, model_args, _ = CASES[name]()
    grid = analysis.ablate(model, model_args, analysis.LogitMetric(token=3), granularity="module")
    blocks = "transformer.h" if name == "gpt2" else "blocks"
    assert grid.rows == tuple(f"{blocks}.{i}.{part}" for i in range(2) for part in parts)
    for path, value in zip(grid.rows, grid.values[:, 0].tolist(), strict=True):
        expected = float(logits_with_output_changed(model, model_args, path, lambda x: x.zero_())[0, -1, 3])
        assert value == pytest.approx(expected, abs=rounding(expected))


def test_patch_batch_averages_metric_over_sequences():
    """Several sequences are patched together; the metric gets the logits of all."""
    model, model_args = decoder(), torch.randint(V, (2, T))
    grid = analysis.patch(model, model_args, change_middle_token(model_args), analysis.LogitMetric(token=1))
    separate = [
        analysis.patch(
            model, model_args[i : i + 1], change_middle_token(model_args[i : i + 1]), analysis.LogitMetric(token=1)
        )
        for i in range(2)
    ]
    torch.testing.assert_close(grid.values, (separate[0].values + separate[1].values) / 2)


def test_ablate_and_logit_lens_accept_keyword_inputs():
    """Use a padded transformers batch with its mask, and shared positions."""
    model, model_args = gpt2(), torch.randint(V, (2, T))
    mask = torch.ones_like(model_args)
    mask[1, -2:] = 0
    call = {"input_ids": model_args, "attention_mask": mask}
    grid = analysis.ablate(model, call, analysis.LogitMetric(token=2, position=1))
    by_one = analysis.ablate(model, call, analysis.LogitMetric(token=2, position=1), batch=1)
    torch.testing.assert_close(grid.values, by_one.values)
    learned, positions = decoder(positions=LearnedPositions(max_len=11), max_len=11), torch.arange(3, 3 + T)
    shifted = analysis.logit_lens(learned, {"ids": model_args, "positions": positions}).logits[-1]
    with torch.no_grad():
        assert torch.equal(shifted, learned(model_args, positions=positions))
    assert analysis.ablate(learned, {"ids": model_args, "positions": positions}).values.shape == (2, 6)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, x: analysis.attribute(m, x.repeat(2, 1)),
            ShapeError,
            "cannot attribute a batch of 2; pass one sequence",
        ),
        (lambda m, x: analysis.attribute(m, x, analysis.LogitMetric(token=V)), ShapeError, "the model has 31 outputs"),
        (
            lambda m, x: analysis.attribute(m, x, analysis.LogitMetric(position=9)),
            ShapeError,
            "position 9 is out of range",
        ),
        (lambda m, x: analysis.attribute(m.train(), x), ConfigError, "call model.eval"),
        (lambda m, x: analysis.logit_lens(m, "text"), DtypeError, "'text' for a Decoder, which has no tokenizer"),
        (lambda m, x: analysis.logit_lens(m, ["text"]), DtypeError, "without a tensor as model input"),
        (lambda m, x: analysis.logit_lens(m, x, positions=T), ShapeError, "position 5 is out of range"),
        (
            lambda m, x: analysis.logit_lens(nn.Linear(5, 3).eval(), torch.randn(2, 5)),
            ConfigError,
            "no blocks were found",
        ),
        (lambda m, x: analysis.logit_lens(lambda x: x, x), DtypeError, "expected a PyTorch module"),
        (lambda m, x: analysis.patch(m, x, x[:, 1:]), ShapeError, "pass two inputs of the same length"),
        (lambda m, x: analysis.patch(m, x, x, lambda logits: logits), ShapeError, "expected one number"),
        (lambda m, x: analysis.patch(m, x, x, batch=0), ConfigError, "batch is 0"),
        (lambda m, x: analysis.patch(m, x, x).restored, ConfigError, "`restored` is undefined"),
        (lambda m, x: analysis.patch(m, x, x, modules="layers.*"), ConfigError, "no module of this model matches"),
        (
            lambda m, x: analysis.ablate(m, x, granularity="rows"),
            ConfigError,
            "expected 'position', 'head' or 'module'",
        ),
        (lambda m, x: analysis.ablate(m, x, to="noise"), ConfigError, "expected 'zero' or 'mean'"),
        (lambda m, x: analysis.LogitMetric()(torch.zeros(1, T, V)), ConfigError, "has no token"),
        (lambda m, x: analysis.compare(analysis.trace(m), m), DtypeError, "got a Decoder; expected two traces"),
        (lambda m, x: analysis.attention_report(m, "text"), DtypeError, "got a Decoder; expected a pipeline"),
        (lambda m, x: analysis.LogitMetric(token=2.5), ConfigError, "token is 2.5; expected a whole number"),
        (lambda m, x: analysis.LogitMetric(token=1, baseline=-1), ConfigError, "baseline is -1"),
        (lambda m, x: analysis.LogitMetric(position="last"), ConfigError, "position is 'last'; expected a whole"),
        (lambda m, x: analysis.patch(m, x, x, 3), ConfigError, "metric is 3; expected a function of the logits"),
    ],
)
def test_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call(decoder(), ids())
