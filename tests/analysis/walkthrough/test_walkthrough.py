"""Values of a walkthrough equal those of the model, of a trace, and of the equations."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from torch import nn

from clearhead import analysis, hub
from clearhead._core.plotting import plot_style
from clearhead.analysis.views import figures
from clearhead.analysis.walkthrough.diagram import draw_architecture
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import ClearheadError
from clearhead.generation import Greedy, generate
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.nn import GELU, Parallel, PostNorm, PreNorm, RMSNorm, SwiGLU
from clearhead.nn.positions import ALiBi, LearnedPositions, RelativeBias, Rotary
from tests.support.browser import BROWSER, run_script_in_page
from tests.support.rounding import assert_equal_up_to_rounding
from tests.support.third_party_models import PEERS
from tests.support.tokenizers import save_text_encoder

SIZES = {"vocab_size": 31, "max_len": 13, "d_model": 24, "n_heads": 4, "d_ff": 23}
EPS = torch.finfo(torch.float32).eps


@functools.cache
def pipeline(name):
    return hub.pipeline(name)


@functools.cache
def hello_walkthrough():
    return analysis.build_walkthrough(pipeline("en-es"), "Hello world")


def perturb(model):
    """Perturb all parameters, so that no zero hides a branch."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def roles(walk, section):
    return [step.role for step in walk.steps if step.section == section]


ATTENTION = ["q", "k", "v", "scores", "mask", "weights", "heads", "out"]
FEED_FORWARD = ["hidden", "feed_forward"]


class TestHelloWorld:
    def test_steps_are_those_of_the_original_transformer(self):
        walk = hello_walkthrough()
        assert roles(walk, "")[:1] == ["characters"]
        assert "".join(walk.steps[0].rows) == "Hello world"
        assert roles(walk, "encoder") == ["tokens", "embedding", "position", "norm"]
        for i in range(4):
            assert roles(walk, f"encoder.blocks.{i}") == ["norm", *ATTENTION, "add", "norm", *FEED_FORWARD, "add"]
            both = ["norm", *ATTENTION, "add"] * 2
            assert roles(walk, f"decoder.blocks.{i}") == [*both, "norm", *FEED_FORWARD, "add"]
        assert roles(walk, "decoder") == ["start", "embedding", "position", "norm", "logits", "softmax", "next"]

    def test_logits_equal_model_and_predictions_equal_generation(self):
        walk, trained = hello_walkthrough(), pipeline("en-es")
        source, target = walk["encoder", "tokens"].values, walk["decoder", "start"].values
        with torch.no_grad():
            logits = trained.model(source[None], target[None])[0]
        assert torch.equal(walk["decoder", "logits"].values, logits)
        ids, _ = encode_sources(trained.tokenizer, ["Hello world"]).padded(torch.tensor([0]), fill=0)
        assert torch.equal(source, ids[0])
        generated = generate(
            trained.model,
            ids,
            strategy=Greedy(),
            max_new_tokens=20,
            decoder_start_ids=trained.tokenizer.bos_id,
            stop_ids=2,
        )
        assert [step.token.id for step in walk.predictions] == generated.sequence(0, with_stop=True).tolist()
        one_by_one = [step.token.probability for step in walk.predictions]
        assert one_by_one == pytest.approx(generated.log_probs[0, 0].exp().tolist(), rel=1e-4)
        for row, step in zip(logits.softmax(-1), walk.predictions, strict=True):
            best = row.topk(5)
            assert [word.id for word in step.top] == best.indices.tolist()
            assert [word.probability for word in step.top] == best.values.tolist()

    def test_weights_equal_traced_weights(self):
        walk, model = hello_walkthrough(), pipeline("en-es").model
        with torch.no_grad(), analysis.trace(model) as t:
            model(walk["encoder", "tokens"].values[None], walk["decoder", "start"].values[None])
        assert len(t.paths) == 12
        for path in t.paths:
            assert torch.equal(walk[path, "weights"].values, t.weights(path)[0])
            assert torch.equal(walk[path, "heads"].values, t.heads(path)[0])

    def test_steps_equal_equations_of_their_sources(self):
        """Compare with attention, feed-forward and sums computed in float64 from the parameters."""
        walk, model = hello_walkthrough(), pipeline("en-es").model
        modules = dict(model.named_modules())
        counts = dict.fromkeys(("q", "k", "v", "scores", "weights", "heads", "out", "norm", "hidden", "add"), 0)
        for step in walk.steps:
            inputs = [walk.steps[i].values.double() for i in step.sources]
            expected_values = equation_values(step, inputs, modules, walk)
            if expected_values is None:
                continue
            counts[step.role] += 1
            close = {"rtol": 0, "atol": 64 * EPS * float(expected_values[expected_values.isfinite()].abs().max())}
            torch.testing.assert_close(step.values.double(), expected_values, **close, msg=str(step.module))
        assert counts == {**dict.fromkeys(ATTENTION[:4], 12), "weights": 12, "heads": 12, "out": 12} | {
            "norm": 22,
            "hidden": 8,
            "add": 20,
        }

    def test_add_steps_are_exact_sums(self):
        walk = hello_walkthrough()
        for step in walk.steps:
            if step.role == "add":
                first, second = (walk.steps[i].values for i in step.sources)
                assert torch.equal(first + second, step.values)

    def test_notes_describe_special_norms(self):
        walk = hello_walkthrough()
        assert walk["encoder.norm", "norm"].note.startswith("This is the memory")
        assert walk["encoder.blocks.2", "norm"].note.startswith("Pre-norm")
        assert walk["decoder.norm", "norm"].note == ""

    def test_mask_steps_equal_causal_and_full_masks(self):
        walk = hello_walkthrough()
        T, S = walk.sizes["T"], walk.sizes["S"]
        assert torch.equal(walk["decoder.blocks.1.attention", "mask"].values[0], torch.ones(T, T).tril().bool())
        assert walk["decoder.blocks.1.cross_attention", "mask"].values.shape == (1, T, S)
        assert walk["decoder.blocks.1.cross_attention", "mask"].values.all()
        assert walk["decoder.blocks.1.attention", "mask"].branch == "masked self-attention"
        assert "copy the answer" in walk["decoder.blocks.1.attention", "mask"].explanation

    def test_walkthrough_removes_hooks(self):
        hello_walkthrough()
        for module in pipeline("en-es").model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks

    def test_to_dict_contains_steps_and_sections(self):
        walk = hello_walkthrough()
        document = json.loads(json.dumps(walk.to_dict(), allow_nan=False))
        assert document["title"] == walk.title
        assert document["sizes"] == walk.sizes
        assert len(document["steps"]) == len(walk.steps)
        assert [section["order"] for section in document["sections"] if section["block"] is not None] == [
            "pre-norm"
        ] * 8
        x = walk["encoder", "embedding"]
        step = document["steps"][walk.steps.index(x)]
        assert step["shape"] == [4, 256]
        assert step["symbols"] == ["S", "M"]
        assert step["values"][1][:3] == [float(f"{value:.4g}") for value in x.values[1, :3].tolist()]
        assert step["norms"] == [float(f"{value:.4g}") for value in x.values.norm(dim=-1).tolist()]


def equation_values(step, inputs, modules, walk):
    """Return the values of a step by its equation from those of its sources, or None without an equation."""
    module = modules.get(step.module)
    if step.role in ("q", "k", "v"):
        H, D = step.shape[0], step.shape[-1]
        return linear(module, inputs[0]).unflatten(-1, (H, D)).transpose(0, 1)
    if step.role == "scores":
        return inputs[0] @ inputs[1].mT / math.sqrt(inputs[0].shape[-1])
    if step.role == "weights":
        scores = walk.steps[walk.steps[step.sources[0]].sources[0]].values.double()
        return scores.masked_fill(inputs[0] == 0, -math.inf).softmax(-1)
    if step.role == "heads":
        return inputs[0] @ inputs[1]
    if step.role == "out":
        return linear(module, inputs[1].transpose(0, 1).flatten(1))
    if step.role == "norm":
        x = inputs[0]
        spread = (x.var(-1, keepdim=True, unbiased=False) + module.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * module.weight.detach().double() + module.bias.detach().double()
    if step.role == "hidden":
        h = linear(module.up, inputs[0])
        return h / 2 * (1 + torch.erf(h / math.sqrt(2)))
    return inputs[0] + inputs[1] if step.role == "add" else None


def linear(module, x):
    return x @ module.weight.detach().double().T + module.bias.detach().double()


class TestOrders:
    """The order of norms in a block is inferred from the run."""

    @pytest.mark.parametrize(
        ("residual", "order", "block", "sums"),
        [
            (
                PreNorm(),
                "pre-norm",
                ["norm", *ATTENTION, "add", "norm", *FEED_FORWARD, "add"],
                ["attention(h)", "feed_forward(h)"],
            ),
            (
                PostNorm(),
                "post-norm",
                [*ATTENTION, "add", "norm", *FEED_FORWARD, "add", "norm"],
                ["attention(x)", "feed_forward(x)"],
            ),
            (
                Parallel(),
                "parallel",
                ["norm", *ATTENTION, "norm", *FEED_FORWARD, "add"],
                ["attention(h) + feed_forward(h)"],
            ),
        ],
    )
    def test_block_order_is_inferred_from_run(self, residual, order, block, sums):
        model = perturb(DecoderConfig(**SIZES, n_layers=2, residual=residual, activation=GELU()).build())
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 7)))
        for i in range(2):
            assert roles(walk, f"blocks.{i}") == block
            adds = [step.formula for step in walk.steps if step.section == f"blocks.{i}" and step.role == "add"]
            assert adds == [f"x = x + {part}" for part in sums]
        assert [section.order for section in walk.sections if section.block is not None] == [order] * 2
        with torch.no_grad():
            assert torch.equal(walk["", "logits"].values, model(walk["", "tokens"].values[None])[0])

    def test_zero_initialized_block_has_all_steps(self):
        model = perturb(DecoderConfig(**SIZES, n_layers=1).build())
        for layer in (model.blocks[0].attention.o_proj, model.blocks[0].feed_forward.down):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 7)))
        assert roles(walk, "blocks.0") == ["norm", *ATTENTION, "norm", *FEED_FORWARD]  # x + 0 is x

    def test_llama_block_has_grouped_keys_and_rotary_note(self):
        rotary = {"positions": Rotary(), "n_kv_heads": 2, "norm": RMSNorm(), "activation": SwiGLU(), "bias": False}
        walk = analysis.build_walkthrough(
            perturb(DecoderConfig(**SIZES, n_layers=1, **rotary).build()), torch.randint(31, (1, 7))
        )
        assert "between" not in roles(walk, "blocks.0")
        assert walk["blocks.0", "k"].symbols == ("K", "T", "D")
        assert walk["blocks.0", "k"].shape == (2, 7, 6)
        assert walk["blocks.0", "q"].formula == "q = h W_Q"
        assert walk["blocks.0", "q"].note.startswith("Rotated by an angle")
        assert not walk["blocks.0", "v"].note
        assert walk["blocks.0", "norm"].formula == "h = x / √(mean(x²) + ε) · γ"

    @pytest.mark.parametrize("positions", [ALiBi(), RelativeBias()])
    def test_position_bias_is_not_memory(self, positions):
        sizes = SIZES | {"n_encoder_layers": 1, "n_decoder_layers": 1, "positions": positions}
        model = perturb(EncoderDecoderConfig(**sizes).build())
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 5)), torch.randint(31, (1, 7)))
        branches = [step.branch for step in walk.steps if step.role == "q"]
        assert branches == ["self-attention", "masked self-attention", "cross-attention"]
        assert walk["decoder.blocks.0.attention", "scores"].formula == "scores = q kᵀ / √D + bias"
        k = walk["decoder.blocks.0.cross_attention", "k"]
        assert k.formula.startswith("k = memory W_K")
        assert walk.steps[k.sources[0]].module == "encoder.norm"
        bias = walk["decoder.positions", "bias"].values
        scores = walk["decoder.blocks.0.attention", "scores"]
        q, k = (walk.steps[i].values for i in scores.sources[:2])
        torch.testing.assert_close(scores.values, q @ k.mT / math.sqrt(6) + bias, rtol=0, atol=1e-5)

    def test_encoder_ends_with_vectors(self):
        sizes = SIZES | {"residual": PostNorm(), "embedding_norm": True, "n_segments": 2}
        model = perturb(EncoderConfig(**sizes, n_layers=1, positions=LearnedPositions(max_len=13)).build())
        ids = torch.randint(31, (1, 7))
        walk = analysis.build_walkthrough(model, ids)
        assert roles(walk, "") == ["tokens", "embedding", "between", "position", "norm", "vectors"]
        assert walk["", "between"].note == "The same vector was added to every token."
        with torch.no_grad():
            assert torch.equal(walk.steps[-1].values, model(ids)[0])

    def test_vision_model_has_the_expected_steps(self):
        model = perturb(
            VisionConfig(image_size=(12, 8), patch_size=4, n_classes=7, n_layers=1, d_model=24, n_heads=4).build()
        )
        image = torch.rand(1, 3, 12, 8)
        walk = analysis.build_walkthrough(model, image)
        assert roles(walk, "") == ["patches", "front", "position", "norm", "pool", "logits"]
        assert walk["", "patches"].shape == (6, 24)
        assert walk["", "front"].shape == (7, 24)
        assert walk["", "pool"].formula == "x = the first token's x"
        with torch.no_grad():
            assert torch.equal(walk["", "logits"].values, model(image)[0])


def test_text_of_maximum_length_is_pooled():
    """At most 256 tokens are encoded; the last generated token is not."""
    walk = analysis.build_walkthrough(pipeline("shakespeare"), "x" * 254)
    assert (walk.sizes["T"], len(walk.predictions)) == (256, 3)
    step = walk.to_dict()["steps"][walk.steps.index(walk["blocks.0", "weights"])]
    assert step["pooled"] is True
    assert (len(step["values"][0]), len(step["values"][0][0])) == (64, 64)
    weights = walk["blocks.0", "weights"].values
    assert step["values"][3][63][1] == pytest.approx(float(weights[3, 252:, 4:8].mean()), rel=1e-3)


class TestThirdPartyModels:
    def test_exported_folder_has_the_same_steps(self, tmp_path):
        hub.export(pipeline("shakespeare"), tmp_path / "out")
        original, exported = (
            analysis.build_walkthrough(step, "ROMEO:")
            for step in (pipeline("shakespeare"), hub.pipeline(tmp_path / "out"))
        )
        assert exported.title == original.title
        assert [step.role for step in exported.steps] == [step.role for step in original.steps]
        assert_equal_up_to_rounding(exported["", "logits"].values, original["", "logits"].values)

    def test_third_party_encoder_uses_its_tokenizer(self, tmp_path):
        trained = hub.pipeline(save_text_encoder(tmp_path))
        walk = analysis.build_walkthrough(trained, "the quick brown fox")
        assert "".join(walk.steps[0].rows) == "the quick brown fox"
        assert walk["", "tokens"].values.tolist() == trained.tokenizer.prompt("the quick brown fox")
        assert walk.steps[-1].role == "vectors"
        assert walk.predictions == []

    def test_torch_encoder_has_the_expected_steps(self):
        layer = nn.TransformerEncoderLayer(24, 4, 23, batch_first=True)
        model = perturb(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        x = torch.randn(1, 7, 24)
        walk = analysis.build_walkthrough(model, x)
        assert roles(walk, "layers.1") == [*ATTENTION, "add", "norm", "linear", "between", "linear", "add", "norm"]
        assert walk.sections[-1].order == "post-norm" or walk.sections[-2].order == "post-norm"
        with torch.no_grad():
            torch.testing.assert_close(walk.steps[-1].values, model(x)[0])

    @pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
    def test_transformers_model_has_the_expected_steps(self, name):
        key = next(key for key in PEERS if key.replace("-", "_").startswith(name))
        peer = PEERS[key]
        model = peer.build().float().eval()
        ids = torch.randint(31, (1, 7))
        walk = analysis.build_walkthrough(model, ids)
        with torch.no_grad():
            assert torch.equal(walk["", "logits"].values, model(ids).logits[0].float())
        assert sum(step.role == "weights" for step in walk.steps) == 2
        assert sum(step.role == "add" for step in walk.steps if step.section.endswith(".0")) >= 1


class TestText:
    def test_text_expands_one_block_per_stack(self):
        text = hello_walkthrough().text()
        assert len(text.splitlines()) < 700
        assert "decoder.blocks.0.cross_attention" in text
        assert "decoder.blocks.1.cross_attention" not in text
        assert text.count("steps with the same roles") == 6
        other = hello_walkthrough().text(layer="decoder.blocks.2", head=3)
        assert "decoder.blocks.2.cross_attention" in other
        assert "head 3 of 8" in other
        assert other.count("steps with the same roles") == 7

    def test_text_contains_values(self):
        walk, text = hello_walkthrough(), hello_walkthrough().text(head=5)
        weights = walk["encoder.blocks.0", "weights"].values[5]
        for row in weights:
            assert "  ".join(f"{value:.2f}".rjust(4) for value in row[:2].tolist())[:4] in text
        assert f"mundo █ {walk.predictions[2].token.probability:.3f}" in text
        assert f"norm {float(walk['encoder', 'position'].values[0].norm()):.3g}" in text

    def test_text_prints_each_explanation_once(self):
        assert hello_walkthrough().text().count("This is the only place where") == 1


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_walkthrough_page_in_browser(tmp_path):
    walk = hello_walkthrough()
    results = run_script_in_page(tmp_path, walk.html(), "walk.js")
    assert results["title"] == walk.title
    assert results["opened"][1] == "Decoder block 0 · pre-norm · cross-attention"
    assert results["opened"][0].endswith(". Softmax")
    assert results["flow"] == ["Q", "K", "scores", "mask", "softmax", "V", "output of the head"]
    assert results["start"] == "0. Characters"
    assert results["next"] == "1. Tokens and their ids"
    assert {"Encoder block 0: Self-attention", "Decoder block 0: Masked self-attention"} < set(results["nodes"])
    assert {"Encoder block 3: Encoder block 3", "Out of the decoder: Next token"} < set(results["nodes"])
    assert (results["skips"], results["memory"], results["loop"]) == (5, 4, 1)
    assert results["clicked"][1] == "Decoder block 0 · pre-norm · cross-attention"
    weights = walk["decoder.blocks.0.cross_attention", "weights"].values
    assert results["softmax"][1:] == [
        "Head 3 of 8",
        [[f"{float(f'{v:.4g}'):.2f}" for v in row] for row in weights[3].tolist()],
    ]
    assert results["softmax"][0] == f"{walk.steps.index(walk['decoder.blocks.0.cross_attention', 'weights'])}. Softmax"
    below = walk.steps.index(walk["decoder.blocks.1.cross_attention", "weights"])
    assert results["below"] == [f"{below}. Softmax", "Decoder block 1 · pre-norm · cross-attention", f"{below}/3"]
    assert results["folded"] == [f"{stack} block {i}" for stack in ("Encoder", "Decoder") for i in (0, 2, 3)]
    assert results["head"] == "Head 4 of 8"
    assert results["entered"] == "0. Characters"
    assert results["end"].endswith("The next token")
    assert results["written"] == [step.token.token.strip() for step in walk.predictions]
    assert [[line[0] for line in table] for table in results["likeliest"]] == [
        [word.token.strip() or word.token for word in step.top] for step in walk.predictions
    ]
    assert all(table[0][2] == "selected" for table in results["likeliest"])
    assert results["vector"] == [False, True, 256, False]
    assert results["svg"].startswith("<svg")
    assert "Masked self-attention" in results["svg"]
    assert results["printed"] is True
    assert results["help"] is True
    assert results["paper"] == 1 + 3 + 14 + 1 + 3 + 24 + 4
    assert results["wide"] is True


def test_walkthrough_html_is_self_contained():
    page = analysis.build_walkthrough(pipeline("sort-dedup"), "D A A").html()
    assert "default-src 'none'" in page
    assert "http://www.w3.org/2000/svg" in page
    assert "https://" not in page
    html = analysis.build_walkthrough(pipeline("sort-dedup"), "D A A")._repr_html_()
    assert html.startswith("<iframe srcdoc=")


@pytest.mark.bad_input
def test_missing_step_head_and_attention_raise():
    with pytest.raises(ClearheadError, match="unknown step 'wights' in encoder; the roles are: characters"):
        hello_walkthrough()["encoder", "wights"]
    with pytest.raises(ClearheadError, match="unknown head 8; expected 0 to 7"):
        hello_walkthrough().text(head=8)
    with pytest.raises(ClearheadError, match="Linear has no attention that can be recorded"):
        analysis.build_walkthrough(nn.Linear(3, 5), torch.randn(1, 7, 3))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_architecture_is_drawn_with_the_boxes_of_the_model(tmp_path, theme):
    pytest.importorskip("matplotlib")
    with plot_style(theme):
        figure = draw_architecture(hello_walkthrough())
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert (
        labels.count("Masked self-attention") == labels.count("Cross-attention") == labels.count("Self-attention") == 1
    )
    assert {f"{stack} block {i}" for stack in ("Encoder", "Decoder") for i in range(4)} <= set(labels)
    assert labels.count("+") == 5
    assert figures.save(figure, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in figures.save(figure, tmp_path / "a.svg").read_bytes()


def test_page_contains_whole_vectors_of_a_small_model():
    data = hello_walkthrough().to_dict()
    steps = [step for step in data["steps"] if step["role"] == "embedding"]
    assert [len(step["values"][0]) for step in steps] == [step["shape"][-1] for step in steps] == [256, 256]
