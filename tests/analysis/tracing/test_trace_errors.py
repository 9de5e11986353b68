"""Invalid use of a trace raises an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.attention import Additive
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models import Decoder, DecoderConfig
from clearhead.nn import MultiHeadAttention


def decoder(**changes):
    sizes = {"vocab_size": 31, "d_model": 24, "n_heads": 6, "n_kv_heads": 2, "n_layers": 2}
    return Decoder(DecoderConfig(**{**sizes, **changes})).eval()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("path", "pattern", "message"),
    [
        (
            "",
            "block.0",
            r"no module of this model matches 'block.0'; did you mean 'blocks\.0\'\? Its .*layers are: blocks",
        ),
        ("blocks.0.norm1", "embedding.weights", r"matches 'embedding\.weights'"),
    ],
)
def test_trace_of_unknown_module_raises(path, pattern, message):
    with pytest.raises(ConfigError, match=message):
        analysis.trace(decoder().get_submodule(path), pattern)


@pytest.mark.bad_input
@pytest.mark.parametrize("runs", [0, 1.5, "all"])
def test_trace_without_number_of_runs_to_keep_raises(runs):
    with pytest.raises(ConfigError, match=f"runs is {runs!r}; expected a whole number of at least 1"):
        analysis.trace(decoder(), runs=runs)


@pytest.mark.bad_input
def test_trace_of_pattern_that_is_no_text_raises():
    with pytest.raises(DtypeError, match="got a int as a pattern"):
        analysis.trace(decoder(), 7)


@pytest.mark.bad_input
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_trace_of_torchscript_raises():
    script = torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="the model is TorchScript, and a compiled graph cannot be traced"):
        analysis.trace(nn.Sequential(script)[0])
    with pytest.raises(ConfigError, match="0 is TorchScript"):
        analysis.trace(nn.Sequential(script))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (lambda t: t.weights("blocks.0.attention"), ShapeError, "has not attended inside this trace"),
        (lambda t: t.weights("x"), ConfigError, "'x' is not recorded"),
        (lambda t: t.output("blocks.0"), ConfigError, "no output was recorded for blocks.0; recorded: none"),
        (lambda t: t.norms(), ConfigError, r'ch\.trace\(model, "\*\*\.blocks\.\*\.output"\)'),
    ],
    ids=["no run", "no module", "no output", "no norms"],
)
def test_reading_an_empty_trace_raises(read, error, message):
    with analysis.trace(decoder()) as t, pytest.raises(error, match=message):
        read(t)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 6}, ShapeError, "head 6 was asked for; this layer has 6: 0 … 5"),
        ({"rows": [0.5]}, DtypeError, "expected an integer, several, a slice, or None"),
        ({"heads": 0.5}, DtypeError, "expected an integer, several, a slice, or None"),
        ({"run": 1}, ShapeError, r"run 1 was asked for; blocks\.0\.attention has 1: 0 … 0"),
    ],
    ids=str,
)
def test_weights_with_invalid_indices_raise(options, error, message):
    model = decoder()
    with analysis.trace(model) as t:
        model(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(error, match=message):
        t.weights("blocks.0.attention", **options)


@pytest.mark.bad_input
def test_entering_a_recording_trace_raises():
    with analysis.trace(decoder()) as t, pytest.raises(ConfigError, match="is already recording"):
        t.__enter__()


@pytest.mark.bad_input
def test_heatmap_with_wrong_labels_raises():
    with pytest.raises(ShapeError, match=r"\(2, 3\) and there are 1 row"):
        analysis.heatmap(torch.zeros(2, 3), ["a"], ["b"])


@pytest.mark.bad_input
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("pattern", ["blocks.*.attention", "blocks.*.output", "blocks.*.input"])
def test_trace_under_torch_func_raises_config_error(pattern):
    """Tensors of a transform cannot be stored, because they are invalid after it."""
    model = decoder()
    ids = torch.randint(31, (3, 7))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with analysis.trace(model, pattern) as t:
        for transformed in (
            lambda: torch.func.vmap(lambda row: model(row[None]))(ids),
            lambda: torch.func.grad(lambda w: torch.func.functional_call(model, w, (ids,)).sum())(weights),
        ):
            with pytest.raises(ConfigError, match=r"torch\.func or FakeTensorMode, whose tensors"):
                transformed()
        model(ids)
    assert t.runs == 1


def test_difference_with_dropout_raises_config_error():
    model = decoder(attention_dropout=0.4).train()
    with analysis.trace(model) as t:
        model(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"applied dropout 0.4 to its weights"):
        t.difference("blocks.0.attention")


@pytest.mark.compiled
def test_trace_compiled_model_raises_config_error():
    model = decoder()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ConfigError, match="the model is compiled, and a compiled graph cannot be traced"):
        analysis.trace(compiled)
    with torch.no_grad(), analysis.trace(compiled._orig_mod) as t:
        compiled._orig_mod(torch.zeros(1, 3, dtype=torch.long))
    assert t.runs == 1
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"blocks\.1 was compiled in place"):
        analysis.trace(model)


class InPlace(nn.Module):
    """Adds the residual in place, to the input or to the output of the layer."""

    def __init__(self, into):
        super().__init__()
        self.layer, self.last = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 6)
        self.into = into

    def forward(self, x):
        x = x.clone()
        y = self.layer(x, x, x)[0]
        if self.into == "input":
            x += y
            return self.last(x)
        y += x
        return self.last(y)


@pytest.mark.bad_input
def test_tensor_modified_in_place_raises_config_error():
    for into in ("input", "output"):
        model = InPlace(into).eval()
        with torch.no_grad(), analysis.trace(model, "layer.weights", "layer.output", "last.output") as t:
            out = model(torch.randn(2, 5, 6))
        assert torch.equal(t.output("last"), out)
        with pytest.raises(ConfigError, match="was modified in place since it was recorded"):
            t.weights("layer") if into == "input" else t.output("layer")


@pytest.mark.bad_input
def test_modified_score_parameters_raise_config_error():
    layer = MultiHeadAttention(14, 2, scores=Additive(7, 7, 5))
    with analysis.trace(layer) as t:
        layer(torch.randn(2, 3, 14))
    before = t.weights("")
    assert before.shape == (2, 2, 3, 3)
    with torch.no_grad():
        next(layer.scores.parameters()).mul_(2)
    with pytest.raises(ConfigError, match="was modified in place since it was recorded"):
        t.weights("")
