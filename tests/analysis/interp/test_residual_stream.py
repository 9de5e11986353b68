"""Attribution, logit lens, patching and ablation, compared with forward hooks for several kinds of models."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from clearhead import analysis
from clearhead.analysis.interp.residual_stream import record_residual_stream
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, EncoderDecoderConfig, VisionConfig, vision
from clearhead.nn import Parallel, PostNorm, RMSNorm
from clearhead.nn.positions import ALiBi, LearnedPositions, Rotary

V, T, S = 31, 5, 3
SIZES = {"d_model": 24, "n_heads": 6}
KINDS = {
    "pre-norm": {},
    "post-norm": {"residual": PostNorm()},
    "rms, rotary, untied": {"norm": RMSNorm(), "positions": Rotary(), "tie_embeddings": False},
    "unit offset, ALiBi": {"norm": RMSNorm(unit_offset=True), "positions": ALiBi()},
    "parallel, learned, embedding norm, scaled": {
        "residual": Parallel(),
        "positions": LearnedPositions(max_len=11),
        "max_len": 11,
        "embedding_norm": True,
        "scaled_embedding": True,
    },
}


def randomize(model):
    """Return the model in float64 with random parameters, so that a missing norm or bias changes the result."""
    for name, parameter in model.named_parameters():
        middle = 0.0 if parameter.dim() > 1 or "bias" in name else 1.0
        nn.init.normal_(parameter, mean=middle, std=0.3)
    return model.double().eval()


def decoder(**options):
    return randomize(Decoder(DecoderConfig(n_layers=2, n_kv_heads=2, vocab_size=V, **SIZES, **options)))


def encoder_decoder():
    return randomize(
        EncoderDecoder(EncoderDecoderConfig(n_encoder_layers=2, n_decoder_layers=2, vocab_size=V, **SIZES))
    )


def vision_model(pooling):
    sizes = {"image_size": (12, 8), "patch_size": 4, "n_channels": 1, "n_classes": 5, "n_layers": 2}
    return randomize(VisionConfig(**sizes, **SIZES, pooling=pooling).build())


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return randomize(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_head=6, n_layer=2, vocab_size=V, **ends, **options)
        )
    )


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
    return randomize(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=V))
    )


def ids(length=T):
    return torch.randint(V, (1, length))


def change_middle_token(x):
    """Return a copy with another token in the middle."""
    other = x.clone()
    other[:, x.shape[1] // 2] = (x[:, x.shape[1] // 2] + 1) % V
    return other


def image():
    return torch.randn(1, 1, 12, 8, dtype=torch.float64)


CASES = {
    **{
        name: lambda options=options: (decoder(**options), ids(), change_middle_token)
        for name, options in KINDS.items()
    },
    "encoder-decoder": lambda: (
        encoder_decoder(),
        (ids(S), ids()),
        lambda model_args: (model_args[0], change_middle_token(model_args[1])),
    ),
    "vision, [CLS]": lambda: (vision_model(vision.ClsPooling()), image(), lambda x: x.flip(-1)),
    "vision, mean": lambda: (vision_model(vision.MeanPooling()), image(), lambda x: x.flip(-1)),
    "gpt2": lambda: (gpt2(), ids(), change_middle_token),
    "llama": lambda: (llama(), ids(), change_middle_token),
}


PATCHING_CASES = ("pre-norm", "encoder-decoder", "vision, [CLS]", "gpt2", "llama")


@pytest.fixture(params=CASES, scope="module")
def case(request):
    torch.manual_seed(3)
    model, model_args, change = CASES[request.param]()
    return request.param, model, model_args, change(model_args)


def run_logits(model, model_args):
    with torch.no_grad():
        output = model(*model_args) if isinstance(model_args, tuple) else model(model_args)
    return getattr(output, "logits", output)


@contextmanager
def forward_hooks(*hooks):
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def record_with_hooks(model, paths, model_args):
    """Return inputs and outputs of modules, recorded by forward hooks, and the logits."""
    inputs, outputs = {}, {}

    def make_hook(path):
        def hook(module, args, output):
            inputs[path] = args[0] if args else None
            outputs[path] = output[0] if isinstance(output, tuple) else output

        return hook

    with forward_hooks(*((model.get_submodule(path), make_hook(path)) for path in paths)):
        logits = run_logits(model, model_args)
    return inputs, outputs, logits


def rounding(*sizes, name=""):
    """Return the tolerance; norms of transformers' Llama compute in float32 in every dtype."""
    return 1e3 * torch.finfo(torch.float32 if name == "llama" else torch.float64).eps * max(1.0, *map(abs, sizes))


# ---------------------------------------------------------------------- attribution


def test_attribute_contributions_sum_to_logit(case):
    name, model, model_args, _ = case
    logits = run_logits(model, model_args)
    for metric in (
        analysis.LogitMetric(),
        analysis.LogitMetric(token=3),
        analysis.LogitMetric(token=4, baseline=1, position=2),
    ):
        attribution = analysis.attribute(model, model_args, metric)
        rows = logits[0] if logits.dim() == 2 else logits[0, metric.position]
        token = int(rows.argmax()) if metric.token is None else metric.token
        expected = rows[token] - (0 if metric.baseline is None else rows[metric.baseline])
        assert attribution.metric.token == token
        assert attribution.logit == pytest.approx(float(expected), abs=0.0)
        size = sum(abs(part.value) for part in attribution.parts)
        assert abs(attribution.residual) <= rounding(size, name=name)
        assert attribution.tolerance < 1e-3 * size
        assert len({(part.path, part.head) for part in attribution.parts}) == len(attribution.parts)


def ablate_with_hooks(model, model_args, token):
    """Return the change of the logit without each (path, head) of a clearhead model.

    Forward hooks fix the scales of the norms and the outputs of all other branches to those of the run.
    """
    blocks = range(len(model.blocks))
    layers = [f"blocks.{i}.attention" for i in blocks]
    branches = ["embedding", *layers, *(f"blocks.{i}.feed_forward" for i in blocks)]
    norms = {path: m for path, m in model.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))}
    projections = [f"{path}.o_proj" for path in layers]
    inputs, outputs, _ = record_with_hooks(model, [*branches, *norms, *projections], model_args)

    def frozen(path):
        x = inputs[path]
        centred = x - x.mean(-1, keepdim=True) if isinstance(norms[path], nn.LayerNorm) else x
        scale = (centred.square().mean(-1, keepdim=True) + norms[path].eps).rsqrt()

        def hook(module, args, output):
            x = args[0] - args[0].mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else args[0]
            weight = module.weight + 1 if type(module).__name__ == "UnitOffsetRMSNorm" else module.weight
            bias = getattr(module, "bias", None)
            return x * scale * weight + (0 if bias is None else bias)

        return hook

    def logit(**replacements):
        all_outputs = outputs | replacements
        output_hooks = [(model.get_submodule(path), lambda *_, x=all_outputs[path]: x) for path in branches]
        with forward_hooks(*((norms[path], frozen(path)) for path in norms), *output_hooks):
            return float(run_logits(model, model_args)[0, -1, token])

    total_logit, effects = logit(), {}
    for path in branches:
        if path not in layers:
            effects[path, None] = total_logit - logit(**{path: torch.zeros_like(outputs[path])})
            continue
        layer = model.get_submodule(path)
        D = layer.d_head
        for head in range(layer.n_heads):
            part = slice(head * D, (head + 1) * D)
            head_output = inputs[f"{path}.o_proj"][..., part] @ layer.o_proj.weight[:, part].T
            effects[path, head] = total_logit - logit(**{path: outputs[path] - head_output})
        bias = layer.o_proj.bias
        if bias is not None:
            effects[f"{path} (output bias)", None] = total_logit - logit(**{path: outputs[path] - bias})
    return effects


@pytest.mark.parametrize("kind", KINDS)
def test_attribute_contribution_equals_ablation_effect(kind):
    model, model_args = decoder(**KINDS[kind]), ids()
    attribution = analysis.attribute(model, model_args, analysis.LogitMetric(token=5))
    values = {(part.path, part.head): part.value for part in attribution.parts}
    effects = ablate_with_hooks(model, model_args, 5)
    assert set(effects) <= set(values)
    for key, expected in effects.items():
        assert values[key] == pytest.approx(expected, abs=rounding(attribution.logit, *values.values())), key
    # The remaining terms are constants: the position table, and biases of norms in the residual stream.
    other_kinds = {part.path: part.kind for part in attribution.parts if (part.path, part.head) not in effects}
    assert set(other_kinds.values()) <= {"embedding", "bias"}
    assert all("norm" in path or "positions" in path for path in other_kinds)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attribute_transformers_model_equals_projection_formula(name):
    model, model_args, _ = CASES[name]()
    if name == "gpt2":
        body, norm, paths = model.transformer, model.transformer.ln_f, ["transformer.wte", "transformer.wpe"]
        layers, ending, last = "transformer.h", ("attn", "c_proj"), "transformer.ln_f"
        blocks, matrix = body.h, lambda projection: projection.weight
    else:
        body, norm, paths = model.model, model.model.norm, ["model.embed_tokens"]
        layers, ending, last = "model.layers", ("self_attn", "o_proj"), "model.norm"
        blocks, matrix = body.layers, lambda projection: projection.weight.T
    mlps = [f"{layers}.{i}.mlp" for i in range(len(blocks))]
    attentions = [f"{layers}.{i}.{ending[0]}" for i in range(len(blocks))]
    inputs, outputs, logits = record_with_hooks(
        model, [*paths, *mlps, last, *(f"{p}.{ending[1]}" for p in attentions)], model_args
    )
    token, x = 4, inputs[last][0, -1]
    centred = x - x.mean() if name == "gpt2" else x
    scale = (centred.square().mean() + (norm.eps if name == "gpt2" else norm.variance_epsilon)).rsqrt()

    def contribution(output):
        output = output.reshape(-1, output.shape[-1])[-1]
        output = output - output.mean() if name == "gpt2" else output
        return float(((output * scale * norm.weight) @ model.lm_head.weight[token]).detach())

    expected_values = {(path, None): contribution(outputs[path]) for path in (*paths, *mlps)}
    for path in attentions:
        projection = model.get_submodule(f"{path}.{ending[1]}")
        for head in range(6):
            part = slice(4 * head, 4 * head + 4)
            expected_values[path, head] = contribution(
                inputs[f"{path}.{ending[1]}"][..., part] @ matrix(projection)[part]
            )
        if name == "gpt2":
            expected_values[f"{path} (output bias)", None] = contribution(projection.bias)
    if name == "gpt2":
        expected_values["transformer.ln_f.bias", None] = float((norm.bias @ model.lm_head.weight[token]).detach())
    attribution = analysis.attribute(model, model_args, analysis.LogitMetric(token=token))
    values = {(part.path, part.head): part.value for part in attribution.parts}
    assert values.keys() == expected_values.keys()
    for key, expected in expected_values.items():
        assert values[key] == pytest.approx(expected, abs=rounding(*expected_values.values(), name=name)), key
    assert sum(expected_values.values()) == pytest.approx(
        float(logits[0, -1, token]), abs=rounding(*expected_values.values(), name=name)
    )
    rows, head_values = attribution.heads()
    assert rows == tuple(attentions)
    assert head_values.tolist() == [[values[path, head] for head in range(6)] for path in rows]


def test_attribution_text_html_and_json():
    attribution = analysis.attribute(decoder(), ids(), analysis.LogitMetric(token=2))
    document = json.loads(json.dumps(attribution.to_dict()))
    assert document["metric"] == {"token": 2, "baseline": None, "position": -1}
    assert sum(part["value"] for part in document["parts"]) + document["residual"] == pytest.approx(document["logit"])
    assert [p.name for p in attribution.parts if p.head == 3] == [f"{i}.3 attention" for i in range(2)]
    assert "Largest contributions to the logit" in str(attribution)
    assert attribution.largest[0].name in str(attribution)
    assert f"<th scope=row>{attribution.largest[0].name}</th>" in attribution._repr_html_()
    assert [abs(p.value) for p in attribution.largest] == sorted(
        (abs(p.value) for p in attribution.parts), reverse=True
    )


def test_attribute_eager_attention_equals_sdpa():
    """Attention that is written out is recorded, and split into heads."""
    model, x = gpt2(), ids()
    expected = analysis.attribute(model, x)
    model.set_attn_implementation("eager")
    attribution = analysis.attribute(model, x)
    assert [part.name for part in attribution.parts] == [part.name for part in expected.parts]
    for part, expected_part in zip(attribution.parts, expected.parts, strict=True):
        assert part.value == pytest.approx(expected_part.value, abs=attribution.tolerance + expected.tolerance)
    assert attribution.heads()[0] == expected.heads()[0]


class EinsumModel(nn.Module):
    """A model whose attention is not recognized."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(24, 24)

        def forward(self, x):
            weights = torch.einsum("btd,bsd->bts", x, x).tanh().exp()
            return x + self.out(torch.einsum("bts,bsd->btd", weights / weights.sum(-1, keepdim=True), x))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 24)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(24, V, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attribute_unrecorded_attention_yields_one_term_per_layer():
    attribution = analysis.attribute(randomize(EinsumModel()), ids())
    assert {part.kind for part in attribution.parts} == {"embedding", "layer"}
    with pytest.raises(ConfigError, match="the heads of this model could not be separated"):
        attribution.heads()


class InPlaceSumModel(nn.Module):
    """A residual stream with in-place operations and a final module. Its torch layers run as one operator unless they
    have hooks, so a traced run is equal only up to rounding."""

    def __init__(self, last):
        super().__init__()
        self.embedding = nn.Embedding(V, 24)
        make = lambda first: nn.TransformerEncoderLayer(24, 6, 37, batch_first=True, norm_first=first)  # noqa: E731
        self.layers = nn.ModuleList(make(i % 2 == 0) for i in range(2))
        self.norm, self.head, self.last = nn.LayerNorm(24), nn.Linear(24, V), last

    def forward(self, model_args):
        x = self.embedding(model_args)
        for layer in self.layers:
            x = layer(x)
        total = torch.zeros_like(x)
        total += x
        total *= 2
        total[:, 0] = 0
        return self.last(self.head(self.norm(total + x)))


def test_attribute_in_place_sums_of_torch_layers_sum_to_logit():
    model = randomize(InPlaceSumModel(nn.Identity()))
    x = ids()
    attribution = analysis.attribute(model, x)
    assert attribution.logit == pytest.approx(float(run_logits(model, x)[0, -1].max()), abs=rounding(attribution.logit))
    assert abs(attribution.residual) <= rounding(attribution.logit)


def test_attribute_nonlinear_head_raises_and_logit_lens_works():
    model, x = randomize(InPlaceSumModel(nn.Tanh())), ids()
    with pytest.raises(ConfigError, match="not linear between its blocks and its logits"):
        analysis.attribute(model, x)
    torch.testing.assert_close(analysis.logit_lens(model, x).logits[-1], run_logits(model, x))


# ---------------------------------------------------------------------- the logit lens


def test_logit_lens_last_layer_equals_model_output(case):
    _, model, model_args, _ = case
    logits = run_logits(model, model_args)
    lens = analysis.logit_lens(model, model_args)
    assert torch.equal(lens.logits[-1], logits)  # to the bit
    assert torch.equal(run_logits(model, model_args), logits)  # and no hook remains
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    assert lens.ranks()[-1].eq(0).all()
    assert len(lens.layers) == 3


def test_logit_lens_equals_norm_and_unembedding():
    model, model_args = decoder(), ids()
    paths = [f"blocks.{i}" for i in range(2)]
    inputs, outputs, _ = record_with_hooks(model, paths, model_args)
    lens = analysis.logit_lens(model, model_args, positions=[-1, 2])
    assert lens.layers == ("into blocks.0", *paths)
    assert lens.positions == (T - 1, 2)
    for layer, x in enumerate([inputs["blocks.0"], *(outputs[path] for path in paths)]):
        with torch.no_grad():
            expected = model.embedding.logits(model.norm(x))[:, [-1, 2]]
        torch.testing.assert_close(lens.logits[layer], expected, rtol=0, atol=0)
    tokens, probabilities = lens.top(3)
    assert tokens.shape == probabilities.shape == (3, 1, 2, 3)
    assert torch.equal(tokens[..., 0], lens.logits.argmax(-1))
    document = json.loads(json.dumps(lens.to_dict(lambda token: f"t{token}", k=2)))
    assert document["layers"][2]["predictions"][1][0]["token"] == f"t{int(tokens[2, 0, 1, 0])}"
    assert "layer 1" in str(lens)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logit_lens_transformers_model_equals_norm_and_unembedding(name):
    model, model_args, _ = CASES[name]()
    body = model.transformer if name == "gpt2" else model.model
    layers, norm = ("transformer.h", body.ln_f) if name == "gpt2" else ("model.layers", body.norm)
    count = len(model.get_submodule(layers))
    _, outputs, _ = record_with_hooks(model, [f"{layers}.{i}" for i in range(count)], model_args)
    lens = analysis.logit_lens(model, model_args)
    for i in range(count):
        with torch.no_grad():
            expected = model.lm_head(norm(outputs[f"{layers}.{i}"]))
        assert torch.equal(lens.logits[i + 1], expected)


class InPlaceBlock(nn.Module):
    """A pre-norm block that adds to its input in place, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, x):
        y = self.layer(self.norm(x)).tanh()
        if not self.in_place:
            return x + y
        x += y
        return x


class InPlaceModel(nn.Module):
    """A model that changes the stream in place inside its blocks and after the last one, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(V, 6), nn.LayerNorm(6), nn.Linear(6, V)
        self.blocks = nn.ModuleList(InPlaceBlock(in_place) for _ in range(3))
        self.in_place = in_place

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        scale = torch.arange(1.0, 7.0, dtype=x.dtype)
        if not self.in_place:
            return self.head(self.norm(x * scale))
        x *= scale
        return self.head(self.norm(x))


@torch.no_grad()
def test_logit_lens_of_stream_changed_in_place_equals_that_of_copies():
    changed = randomize(InPlaceModel(in_place=True))
    copied = InPlaceModel(in_place=False).double().eval()
    copied.load_state_dict(changed.state_dict())
    x = ids()
    lens, expected = (analysis.logit_lens(model, x) for model in (changed, copied))
    assert lens.layers == expected.layers
    torch.testing.assert_close(lens.logits, expected.logits, rtol=0, atol=0)
    assert torch.equal(lens.logits[-1], changed(x))


def test_logit_lens_does_not_affect_other_threads():
    """While a lens replaces blocks in one thread, other threads run the original blocks."""
    model, model_args = decoder(), ids()
    expected, thread_logits = run_logits(model, model_args), []
    real = model.norm.forward

    def norm(x):
        assert not any("forward" in vars(block) for block in model.blocks)
        if threading.current_thread() is threading.main_thread() and not thread_logits:
            other = threading.Thread(
                target=lambda: thread_logits.append(run_logits(model, change_middle_token(model_args)))
            )
            other.start()
            other.join()
        return real(x)

    model.norm.forward = norm
    analysis.logit_lens(model, model_args)
    del model.norm.forward
    assert torch.equal(thread_logits[0], run_logits(model, change_middle_token(model_args)))
    assert torch.equal(run_logits(model, model_args), expected)


def test_logit_lens_works_in_threads_and_inference_mode():
    model, inputs = decoder(), [ids() for _ in range(4)]
    expected = [analysis.logit_lens(model, x).logits for x in inputs]
    logits = {}
    threads = [
        threading.Thread(target=lambda i=i: logits.update({i: analysis.logit_lens(model, inputs[i]).logits}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(logits[i], expected[i]) for i in range(4))
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.inference_mode():
        assert analysis.attribute(model, inputs[0]) == analysis.attribute(model, inputs[0])
        assert torch.equal(analysis.logit_lens(model, inputs[0]).logits, expected[0])


def test_record_residual_stream_keeps_implementations():
    model, model_args = decoder(), ids()
    with torch.no_grad(), analysis.trace(model) as untraced:
        model(model_args)
    with analysis.trace(model) as t:
        stream = record_residual_stream(model, model_args)
    assert t.report() == untraced.report()
    assert torch.equal(stream.logits, run_logits(model, model_args))


# ---------------------------------------------------------------------- patching and ablation


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


# ---------------------------------------------------------------------- errors


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
        (lambda m, x: analysis.logit_lens(m, x, positions=T), ShapeError, "position 5 was asked for"),
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
        (lambda m, x: analysis.LogitMetric(token=2.5), ConfigError, "token is 2.5; expected a whole number"),
        (lambda m, x: analysis.LogitMetric(token=1, baseline=-1), ConfigError, "baseline is -1"),
        (lambda m, x: analysis.LogitMetric(position="last"), ConfigError, "position is 'last'; expected a whole"),
        (lambda m, x: analysis.patch(m, x, x, 3), ConfigError, "metric is 3; expected a function of the logits"),
    ],
)
def test_invalid_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call(decoder(), ids())
