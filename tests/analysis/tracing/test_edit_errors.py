"""Invalid interventions and comparisons raise an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models import Decoder, DecoderConfig
from clearhead.nn import KVCache

LAYER, BLOCK = "blocks.1.attention", "blocks.0"


PATTERNS = ("blocks.*.output", "blocks.*.attention.weights", "output")


def decoder():
    return Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=3, n_kv_heads=2)).double().eval()


def traced(model, ids, *edits, patterns=PATTERNS):
    with torch.no_grad(), analysis.trace(model, *patterns) as t:
        for path, edit in edits:
            t.intervene(path, edit)
        logits = model(ids)
    return logits, t


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "edit", "error", "message"),
    [
        (
            "blocks.9",
            analysis.ZeroAblation(),
            ConfigError,
            "'blocks.9' is not recorded because the model has no module",
        ),
        (LAYER, analysis.ZeroAblation(heads=6), ShapeError, "head 6 is out of range; there are 6"),
        (BLOCK, analysis.ZeroAblation(positions=[7]), ShapeError, "position 7 is out of range; there are 7"),
        (BLOCK, analysis.ReplaceActivation(torch.zeros(5)), ShapeError, r"gave \(5,\) for \(3, 7, 24\)"),
        (BLOCK, analysis.PatchActivation(nn.ReLU()), ConfigError, "got a ReLU; expected a trace of another run"),
        ("blocks.0.norm1", analysis.ZeroAblation(heads=1), ConfigError, r"blocks\.0\.norm1 has no heads"),
        (
            BLOCK,
            analysis.ZeroAblation(heads=1),
            ConfigError,
            r"the edit on blocks\.0 was never applied: the module did not run, or exposes no heads",
        ),
    ],
    ids=["no module", "head", "position", "shape", "no trace", "no heads", "never applied"],
)
def test_invalid_intervention_raises_in_a_run(path, edit, error, message):
    with pytest.raises(error, match=message):
        traced(decoder(), torch.randint(31, (3, 7)), (path, edit))


@pytest.mark.bad_input
def test_patch_from_a_shorter_run_raises():
    model, ids = decoder(), torch.randint(31, (3, 7))
    short = traced(model, ids[:, :3])[1]
    with pytest.raises(ShapeError, match=r"position 6 of blocks.0 cannot be patched from a run of 3 positions"):
        traced(model, ids, (BLOCK, analysis.PatchActivation(short)))


@pytest.mark.bad_input
def test_ablation_of_the_last_position_with_a_cache_raises():
    model, ids = decoder(), torch.randint(31, (3, 7))
    with analysis.trace(model) as t:
        t.intervene(BLOCK, analysis.ZeroAblation(positions=[-1]))
        with pytest.raises(ShapeError, match="with a cache the final length is unknown"):
            model(ids, cache=KVCache())


@pytest.mark.bad_input
def test_comparison_of_different_traces_raises():
    model, ids = decoder(), torch.randint(31, (3, 7))
    with pytest.raises(ShapeError, match=r"returned .* in one run and .* in the other"):
        analysis.compare(traced(model, ids)[1], traced(model, ids[:, :3])[1])
    with pytest.raises(ConfigError, match="no activations in common"):
        analysis.compare(traced(model, ids, patterns=("output",))[1], traced(model, ids, patterns=(LAYER,))[1])


@pytest.mark.bad_input
def test_invalid_intervention_raises_dtype_error():
    model = decoder()
    ids = torch.randint(0, 31, (2, 5))
    with (
        pytest.raises(DtypeError, match="got a float as an intervention; expected ZeroAblation"),
        analysis.trace(model) as t,
    ):
        t.intervene(BLOCK, 0.0)
    with pytest.raises(DtypeError, match="ReplaceActivation got a float; expected a tensor or a function"):
        analysis.ReplaceActivation(0.0)
    nothing = analysis.trace(model).intervene(BLOCK, analysis.ReplaceActivation(lambda x: None))
    with (
        pytest.raises(DtypeError, match=r"the function of ReplaceActivation returned a NoneType for blocks\.0"),
        nothing,
    ):
        model(ids)
    with pytest.raises(DtypeError, match="cannot trace a function; expected a PyTorch module"):
        analysis.trace(lambda x: x)
