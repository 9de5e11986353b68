"""Attribution, logit lens, patching and ablation against the same made by hand with ordinary hooks, model by model."""

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
    "plus one, biases of distance": {"norm": RMSNorm(unit_offset=True), "positions": ALiBi()},
    "parallel, learned, normed, scaled": {
        "residual": Parallel(),
        "positions": LearnedPositions(max_len=11),
        "max_len": 11,
        "embedding_norm": True,
        "scaled_embedding": True,
    },
}


def stirred(model):
    """In float64, with every weight, norm and bias of a size that shows, so that forgetting one would too."""
    for name, parameter in model.named_parameters():
        middle = 0.0 if parameter.dim() > 1 or "bias" in name else 1.0
        nn.init.normal_(parameter, mean=middle, std=0.3)
    return model.double().eval()


def decoder(**options):
    return stirred(Decoder(DecoderConfig(n_layers=2, n_kv_heads=2, vocab_size=V, **SIZES, **options)))


def pair():
    return stirred(EncoderDecoder(EncoderDecoderConfig(n_encoder_layers=2, n_decoder_layers=2, vocab_size=V, **SIZES)))


def picture_model(pooling):
    sizes = {"image_size": (12, 8), "patch_size": 4, "n_channels": 1, "n_classes": 5, "n_layers": 2}
    return stirred(VisionConfig(**sizes, **SIZES, pooling=pooling).build())


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return stirred(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_head=6, n_layer=2, vocab_size=V, **ends, **options)
        )
    )


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
    return stirred(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=V))
    )


def ids(length=T):
    return torch.randint(V, (1, length))


def changed(x):
    """The same with another token in the middle."""
    other = x.clone()
    other[:, x.shape[1] // 2] = (x[:, x.shape[1] // 2] + 1) % V
    return other


def image():
    return torch.randn(1, 1, 12, 8, dtype=torch.float64)


CASES = {
    **{name: lambda options=options: (decoder(**options), ids(), changed) for name, options in KINDS.items()},
    "encoder-decoder": lambda: (pair(), (ids(S), ids()), lambda given: (given[0], changed(given[1]))),
    "a picture, [CLS]": lambda: (picture_model(vision.ClsPooling()), image(), lambda x: x.flip(-1)),
    "a picture, mean": lambda: (picture_model(vision.MeanPooling()), image(), lambda x: x.flip(-1)),
    "gpt2": lambda: (gpt2(), ids(), changed),
    "llama": lambda: (llama(), ids(), changed),
}


FEW = ("pre-norm", "encoder-decoder", "a picture, [CLS]", "gpt2", "llama")


@pytest.fixture(params=CASES, scope="module")
def case(request):
    torch.manual_seed(3)
    model, given, change = CASES[request.param]()
    return request.param, model, given, change(given)


def said(model, given):
    with torch.no_grad():
        found = model(*given) if isinstance(given, tuple) else model(given)
    return getattr(found, "logits", found)


@contextmanager
def hooked(*hooks):
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def kept(model, paths, given):
    """What modules were given and gave, by plain hooks, and the logits."""
    inputs, outputs = {}, {}

    def keep(path):
        def hook(module, args, output):
            inputs[path] = args[0] if args else None
            outputs[path] = output[0] if isinstance(output, tuple) else output

        return hook

    with hooked(*((model.get_submodule(path), keep(path)) for path in paths)):
        logits = said(model, given)
    return inputs, outputs, logits


def rounding(*sizes, name=""):
    """transformers' Llama has norms that work in float32 whatever the model's dtype is."""
    return 1e3 * torch.finfo(torch.float32 if name == "llama" else torch.float64).eps * max(1.0, *map(abs, sizes))


# ---------------------------------------------------------------------- attribution


def test_parts_add_up_to_the_logit(case):
    name, model, given, _ = case
    logits = said(model, given)
    for answer in (
        analysis.LogitMetric(),
        analysis.LogitMetric(token=3),
        analysis.LogitMetric(token=4, baseline=1, position=2),
    ):
        found = analysis.attribute(model, given, answer)
        rows = logits[0] if logits.dim() == 2 else logits[0, answer.position]
        token = int(rows.argmax()) if answer.token is None else answer.token
        wanted = rows[token] - (0 if answer.baseline is None else rows[answer.baseline])
        assert found.metric.token == token
        assert found.logit == pytest.approx(float(wanted), abs=0.0)
        size = sum(abs(part.value) for part in found.parts)
        assert abs(found.residual) <= rounding(size, name=name)
        assert found.tolerance < 1e-3 * size
        assert len({(part.path, part.head) for part in found.parts}) == len(found.parts)


def by_hand(model, given, token):
    """(path, head) → what the logit loses without it, in a model of ours whose norms keep the scales of the run and
    whose branches give what they gave: every run of it is made by replacing outputs in hooks."""
    blocks = range(len(model.blocks))
    layers = [f"blocks.{i}.attention" for i in blocks]
    branches = ["embedding", *layers, *(f"blocks.{i}.feed_forward" for i in blocks)]
    norms = {path: m for path, m in model.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))}
    projections = [f"{path}.o_proj" for path in layers]
    inputs, outputs, _ = kept(model, [*branches, *norms, *projections], given)

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

    def logit(**instead):
        given_back = outputs | instead
        gives = [(model.get_submodule(path), lambda *_, x=given_back[path]: x) for path in branches]
        with hooked(*((norms[path], frozen(path)) for path in norms), *gives):
            return float(said(model, given)[0, -1, token])

    whole, found = logit(), {}
    for path in branches:
        if path not in layers:
            found[path, None] = whole - logit(**{path: torch.zeros_like(outputs[path])})
            continue
        layer = model.get_submodule(path)
        D = layer.d_head
        for head in range(layer.n_heads):
            part = slice(head * D, (head + 1) * D)
            wrote = inputs[f"{path}.o_proj"][..., part] @ layer.o_proj.weight[:, part].T
            found[path, head] = whole - logit(**{path: outputs[path] - wrote})
        bias = layer.o_proj.bias
        if bias is not None:
            found[f"{path} (output bias)", None] = whole - logit(**{path: outputs[path] - bias})
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_is_what_is_lost_without_it(kind):
    model, given = decoder(**KINDS[kind]), ids()
    found = analysis.attribute(model, given, analysis.LogitMetric(token=5))
    ours = {(part.path, part.head): part.value for part in found.parts}
    hand = by_hand(model, given, 5)
    assert set(hand) <= set(ours)
    for key, wanted in hand.items():
        assert ours[key] == pytest.approx(wanted, abs=rounding(found.logit, *ours.values())), key
    # What else there is are constants: the table of positions, and biases of norms on the stream.
    others = {part.path: part.kind for part in found.parts if (part.path, part.head) not in hand}
    assert set(others.values()) <= {"embedding", "bias"}
    assert all("norm" in path or "positions" in path for path in others)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_of_transformers_models_by_hand(name):
    model, given, _ = CASES[name]()
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
    inputs, outputs, logits = kept(model, [*paths, *mlps, last, *(f"{p}.{ending[1]}" for p in attentions)], given)
    token, x = 4, inputs[last][0, -1]
    centred = x - x.mean() if name == "gpt2" else x
    scale = (centred.square().mean() + (norm.eps if name == "gpt2" else norm.variance_epsilon)).rsqrt()

    def share(wrote):
        wrote = wrote.reshape(-1, wrote.shape[-1])[-1]
        wrote = wrote - wrote.mean() if name == "gpt2" else wrote
        return float(((wrote * scale * norm.weight) @ model.lm_head.weight[token]).detach())

    hand = {(path, None): share(outputs[path]) for path in (*paths, *mlps)}
    for path in attentions:
        projection = model.get_submodule(f"{path}.{ending[1]}")
        for head in range(6):
            part = slice(4 * head, 4 * head + 4)
            hand[path, head] = share(inputs[f"{path}.{ending[1]}"][..., part] @ matrix(projection)[part])
        if name == "gpt2":
            hand[f"{path} (output bias)", None] = share(projection.bias)
    if name == "gpt2":
        hand["transformer.ln_f.bias", None] = float((norm.bias @ model.lm_head.weight[token]).detach())
    found = analysis.attribute(model, given, analysis.LogitMetric(token=token))
    ours = {(part.path, part.head): part.value for part in found.parts}
    assert ours.keys() == hand.keys()
    for key, wanted in hand.items():
        assert ours[key] == pytest.approx(wanted, abs=rounding(*hand.values(), name=name)), key
    assert sum(hand.values()) == pytest.approx(float(logits[0, -1, token]), abs=rounding(*hand.values(), name=name))
    rows, values = found.heads()
    assert rows == tuple(attentions)
    assert values.tolist() == [[ours[path, head] for head in range(6)] for path in rows]


def test_an_attribution_in_words_and_numbers():
    found = analysis.attribute(decoder(), ids(), analysis.LogitMetric(token=2))
    document = json.loads(json.dumps(found.to_dict()))
    assert document["metric"] == {"token": 2, "baseline": None, "position": -1}
    assert sum(part["value"] for part in document["parts"]) + document["residual"] == pytest.approx(document["logit"])
    assert [p.name for p in found.parts if p.head == 3] == [f"{i}.3 attention" for i in range(2)]
    assert "Largest contributions to the logit" in str(found)
    assert found.largest[0].name in str(found)
    assert f"<th scope=row>{found.largest[0].name}</th>" in found._repr_html_()
    assert [abs(p.value) for p in found.largest] == sorted((abs(p.value) for p in found.parts), reverse=True)


def test_layers_whose_attention_is_not_seen_are_parts_as_a_whole():
    found = analysis.attribute(gpt2(attn_implementation="eager"), ids())
    assert {part.kind for part in found.parts} == {"embedding", "layer", "bias"}
    with pytest.raises(ConfigError, match="the heads of this model could not be separated"):
        found.heads()


class Odd(nn.Module):
    """A stream that is written over, doubled, and read through what `last` makes of it. Its layers are torch's, which
    run as one operator unless somebody hooks into them: a watched run is the same to rounding."""

    def __init__(self, last):
        super().__init__()
        self.embedding = nn.Embedding(V, 24)
        make = lambda first: nn.TransformerEncoderLayer(24, 6, 37, batch_first=True, norm_first=first)  # noqa: E731
        self.layers = nn.ModuleList(make(i % 2 == 0) for i in range(2))
        self.norm, self.head, self.last = nn.LayerNorm(24), nn.Linear(24, V), last

    def forward(self, given):
        x = self.embedding(given)
        for layer in self.layers:
            x = layer(x)
        total = torch.zeros_like(x)
        total += x
        total *= 2
        total[:, 0] = 0
        return self.last(self.head(self.norm(total + x)))


def test_in_place_sums_and_torch_layers():
    model = stirred(Odd(nn.Identity()))
    x = ids()
    found = analysis.attribute(model, x)
    assert found.logit == pytest.approx(float(said(model, x)[0, -1].max()), abs=rounding(found.logit))
    assert abs(found.residual) <= rounding(found.logit)


def test_what_is_no_sum_is_refused_and_the_lens_still_works():
    model, x = stirred(Odd(nn.Tanh())), ids()
    with pytest.raises(ConfigError, match="not linear between its blocks and its logits"):
        analysis.attribute(model, x)
    torch.testing.assert_close(analysis.logit_lens(model, x).logits[-1], said(model, x))


# ---------------------------------------------------------------------- the logit lens


def test_the_last_layer_of_the_lens_is_the_model(case):
    _, model, given, _ = case
    logits = said(model, given)
    found = analysis.logit_lens(model, given)
    assert torch.equal(found.logits[-1], logits)  # to the bit
    assert torch.equal(said(model, given), logits)  # and nothing is left behind
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    assert found.ranks()[-1].eq(0).all()
    assert len(found.layers) == 3


def test_the_lens_by_hand():
    model, given = decoder(), ids()
    paths = [f"blocks.{i}" for i in range(2)]
    inputs, outputs, _ = kept(model, paths, given)
    found = analysis.logit_lens(model, given, positions=[-1, 2])
    assert found.layers == ("into blocks.0", *paths)
    assert found.positions == (T - 1, 2)
    for layer, x in enumerate([inputs["blocks.0"], *(outputs[path] for path in paths)]):
        with torch.no_grad():
            wanted = model.embedding.logits(model.norm(x))[:, [-1, 2]]
        torch.testing.assert_close(found.logits[layer], wanted, rtol=0, atol=0)
    tokens, chances = found.top(3)
    assert tokens.shape == chances.shape == (3, 1, 2, 3)
    assert torch.equal(tokens[..., 0], found.logits.argmax(-1))
    document = json.loads(json.dumps(found.to_dict(lambda token: f"t{token}", k=2)))
    assert document["layers"][2]["predictions"][1][0]["token"] == f"t{int(tokens[2, 0, 1, 0])}"
    assert "layer 1" in str(found)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_lens_of_transformers_models_by_hand(name):
    model, given, _ = CASES[name]()
    body = model.transformer if name == "gpt2" else model.model
    layers, norm = ("transformer.h", body.ln_f) if name == "gpt2" else ("model.layers", body.norm)
    count = len(model.get_submodule(layers))
    _, outputs, _ = kept(model, [f"{layers}.{i}" for i in range(count)], given)
    found = analysis.logit_lens(model, given)
    for i in range(count):
        with torch.no_grad():
            wanted = model.lm_head(norm(outputs[f"{layers}.{i}"]))
        assert torch.equal(found.logits[i + 1], wanted)


def test_another_thread_meets_the_model_as_it_is():
    """While a lens stands in for blocks in one thread, another one runs the real ones."""
    model, given = decoder(), ids()
    wanted, met = said(model, given), []
    real = model.norm.forward

    def norm(x):
        if threading.current_thread() is threading.main_thread() and not met:
            other = threading.Thread(target=lambda: met.append(said(model, changed(given))))
            other.start()
            other.join()
        return real(x)

    model.norm.forward = norm
    analysis.logit_lens(model, given)
    del model.norm.forward
    assert torch.equal(met[0], said(model, changed(given)))
    assert torch.equal(said(model, given), wanted)


def test_lenses_of_two_threads_and_of_inference_mode():
    model, inputs = decoder(), [ids() for _ in range(4)]
    wanted = [analysis.logit_lens(model, x).logits for x in inputs]
    found = {}
    several = [
        threading.Thread(target=lambda i=i: found.update({i: analysis.logit_lens(model, inputs[i]).logits}))
        for i in range(4)
    ]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert all(torch.equal(found[i], wanted[i]) for i in range(4))
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.inference_mode():
        assert analysis.attribute(model, inputs[0]) == analysis.attribute(model, inputs[0])
        assert torch.equal(analysis.logit_lens(model, inputs[0]).logits, wanted[0])


def test_a_watched_run_stays_on_its_fast_path():
    model, given = decoder(), ids()
    with torch.no_grad(), analysis.trace(model) as plain:
        model(given)
    with analysis.trace(model) as t:
        stream = record_residual_stream(model, given)
    assert t.report() == plain.report()
    assert torch.equal(stream.logits, said(model, given))


# ---------------------------------------------------------------------- patching and ablation


def patched_by_hand(model, given, path, change):
    """The logits with a module's output changed in an ordinary hook."""

    def hook(module, args, output):
        x = (output[0] if isinstance(output, tuple) else output).clone()
        change(x)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    with hooked((model.get_submodule(path), hook)):
        return said(model, given)


@pytest.mark.parametrize("case", FEW, indirect=True)
def test_patching_with_the_run_itself_changes_nothing(case):
    _, model, given, _ = case
    for granularity in ("position", "head", "module"):
        grid = analysis.patch(model, given, given, granularity=granularity, batch=1)
        assert (grid.values == grid.baseline).all()  # to the bit
        assert grid.baseline == grid.clean
    at_once = analysis.patch(model, given, given)
    torch.testing.assert_close(
        at_once.values, at_once.values * 0 + at_once.baseline, rtol=0, atol=rounding(at_once.baseline)
    )


@pytest.mark.parametrize("case", FEW, indirect=True)
def test_patching_blocks_by_hand(case):
    _, model, given, corrupted = case
    metric = analysis.LogitMetric(token=3, baseline=2)
    grid = analysis.patch(model, given, corrupted, metric)
    _, clean, logits = kept(model, grid.rows, given)
    assert grid.clean == metric(logits)
    assert grid.baseline == metric(said(model, corrupted))
    assert grid.clean != grid.baseline
    for i, path in enumerate(grid.rows):
        for position in (0, grid.columns[-1] // 2, grid.columns[-1]):

            def change(x, path=path, position=position):
                x[:, position] = clean[path][:, position]

            wanted = metric(patched_by_hand(model, corrupted, path, change))
            assert float(grid.values[i, position]) == pytest.approx(wanted, abs=rounding(wanted))
    torch.testing.assert_close(grid.restored, (grid.values - grid.baseline) / (grid.clean - grid.baseline))
    whole = analysis.patch(model, given, corrupted, metric, granularity="module")
    assert whole.values[-1, 0] == pytest.approx(grid.clean, abs=rounding(grid.clean))


@pytest.mark.parametrize("name", ["pre-norm", "encoder-decoder", "gpt2", "llama"])
def test_heads_by_hand(name):
    """Each head patched, zeroed and put to its mean, at the input of its output projection."""
    model, given, change = CASES[name]()
    corrupted, metric = change(given), analysis.LogitMetric(token=3)
    grids = {
        "patch": analysis.patch(model, given, corrupted, metric, granularity="head", batch=4),
        "zero": analysis.ablate(model, given, metric),
        "mean": analysis.ablate(model, given, metric, to="mean"),
    }
    ending = "c_proj" if name == "gpt2" else "o_proj"
    inputs, _, _ = kept(model, [f"{path}.{ending}" for path in grids["patch"].rows], given)
    for i, path in enumerate(grids["patch"].rows):
        projection, clean = model.get_submodule(f"{path}.{ending}"), inputs[f"{path}.{ending}"]
        for head in (0, 5):
            part = slice(4 * head, 4 * head + 4)
            instead = {
                "patch": clean[..., part],
                "zero": torch.zeros_like(clean[..., part]),
                "mean": clean[..., part].mean((0, 1), keepdim=True),
            }
            for kind, grid in grids.items():

                def before(module, args, value=instead[kind], part=part):
                    x = args[0].clone()
                    x[..., part] = value
                    return (x,)

                handle = projection.register_forward_pre_hook(before)
                wanted = metric(said(model, corrupted if kind == "patch" else given))
                handle.remove()
                assert float(grid.values[i, head]) == pytest.approx(wanted, abs=rounding(wanted)), (kind, path, head)
    plain = grids["zero"].baseline
    assert plain == metric(said(model, given))
    torch.testing.assert_close(grids["zero"].change, grids["zero"].values - plain)


def test_any_module_and_any_metric():
    model, given = pair(), (ids(S), ids())
    corrupted = (changed(given[0]), given[1])
    calls = []

    def chance(logits):
        calls.append(logits.shape)
        return logits[0, -1].softmax(-1)[3]

    grid = analysis.patch(model, given, corrupted, chance, modules="encoder.blocks.*", batch=3)
    assert grid.rows == ("encoder.blocks.0", "encoder.blocks.1")
    assert grid.values.shape == (2, S)
    assert set(calls) == {(1, T, V)}
    assert float(grid.values.std()) > 0
    out = analysis.ablate(model, given, modules="decoder.blocks.*.feed_forward", granularity="module")
    assert out.values.shape == (2, 1)
    hand = patched_by_hand(model, given, "decoder.blocks.1.feed_forward", lambda x: x.zero_())
    assert float(out.values[1, 0]) == pytest.approx(float(hand[0, -1, said(model, given)[0, -1].argmax()]))
    assert json.loads(json.dumps(out.to_dict()))["clean"] is None
    assert "Ablation of each module" in str(out)


@pytest.mark.parametrize(("name", "parts"), [("pre-norm", ("attention", "feed_forward")), ("gpt2", ("attn", "mlp"))])
def test_what_writes_into_the_stream_is_put_out(name, parts):
    model, given, _ = CASES[name]()
    grid = analysis.ablate(model, given, analysis.LogitMetric(token=3), granularity="module")
    blocks = "transformer.h" if name == "gpt2" else "blocks"
    assert grid.rows == tuple(f"{blocks}.{i}.{part}" for i in range(2) for part in parts)
    for path, value in zip(grid.rows, grid.values[:, 0].tolist(), strict=True):
        wanted = float(patched_by_hand(model, given, path, lambda x: x.zero_())[0, -1, 3])
        assert value == pytest.approx(wanted, abs=rounding(wanted))


def test_a_batch_is_one_input():
    """Several sequences are patched together, and the metric sees them all."""
    model, given = decoder(), torch.randint(V, (2, T))
    grid = analysis.patch(model, given, changed(given), analysis.LogitMetric(token=1))
    alone = [
        analysis.patch(model, given[i : i + 1], changed(given[i : i + 1]), analysis.LogitMetric(token=1))
        for i in range(2)
    ]
    torch.testing.assert_close(grid.values, (alone[0].values + alone[1].values) / 2)


def test_arguments_by_name_and_without_a_batch():
    """A padded batch of transformers' with its mask, and positions that all sequences share."""
    model, given = gpt2(), torch.randint(V, (2, T))
    mask = torch.ones_like(given)
    mask[1, -2:] = 0
    call = {"input_ids": given, "attention_mask": mask}
    grid = analysis.ablate(model, call, analysis.LogitMetric(token=2, position=1))
    by_one = analysis.ablate(model, call, analysis.LogitMetric(token=2, position=1), batch=1)
    torch.testing.assert_close(grid.values, by_one.values)
    ours, positions = decoder(positions=LearnedPositions(max_len=11), max_len=11), torch.arange(3, 3 + T)
    moved = analysis.logit_lens(ours, {"ids": given, "positions": positions}).logits[-1]
    with torch.no_grad():
        assert torch.equal(moved, ours(given, positions=positions))
    assert analysis.ablate(ours, {"ids": given, "positions": positions}).values.shape == (2, 6)


# ---------------------------------------------------------------------- mistakes


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
        (lambda m, x: analysis.logit_lens(m, "text"), DtypeError, "without a tensor as model input"),
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
    ],
)
def test_mistakes_are_answered_in_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call(decoder(), ids())
