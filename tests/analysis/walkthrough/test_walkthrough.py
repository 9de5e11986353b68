"""A walk's numbers are the run's: against the model itself, look's own weights, and the equations written out."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from torch import nn

from clearhead import analysis, hub
from clearhead.data.tasks.translation import encode_sources
from clearhead.errors import ClearheadError
from clearhead.generation import Greedy, generate
from clearhead.models import DecoderConfig, EncoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.nn import GELU, Parallel, PostNorm, PreNorm, RMSNorm, SwiGLU
from clearhead.nn.positions import ALiBi, LearnedPositions, RelativeBias, Rotary
from tests.analysis.views.test_browser import BROWSER, opened
from tests.hub.test_text_generation import reader  # noqa: F401 (a fixture)
from tests.support.rounding import assert_equal_up_to_rounding
from tests.support.third_party_models import PEERS

SIZES = {"vocab_size": 31, "max_len": 13, "d_model": 24, "n_heads": 4, "d_ff": 23}
EPS = torch.finfo(torch.float32).eps


@functools.cache
def loaded(name):
    return hub.pipeline(name)


@functools.cache
def hello():
    return analysis.build_walkthrough(loaded("en-es"), "Hello world")


def shaken(model):
    """Every weight moved from its start, so that no zero hides a branch."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def roles(walk, section):
    return [step.role for step in walk.steps if step.section == section]


ATTENTION = ["q", "k", "v", "scores", "mask", "weights", "heads", "out"]
FEED_FORWARD = ["hidden", "feed_forward"]


class TestHelloWorld:
    def test_the_stations_are_those_of_the_2017_model(self):
        walk = hello()
        assert roles(walk, "")[:1] == ["characters"]
        assert "".join(walk.steps[0].rows) == "Hello world"
        assert roles(walk, "encoder") == ["tokens", "embedding", "position", "norm"]
        for i in range(4):
            assert roles(walk, f"encoder.blocks.{i}") == ["norm", *ATTENTION, "add", "norm", *FEED_FORWARD, "add"]
            both = ["norm", *ATTENTION, "add"] * 2
            assert roles(walk, f"decoder.blocks.{i}") == [*both, "norm", *FEED_FORWARD, "add"]
        assert roles(walk, "decoder") == ["start", "embedding", "position", "norm", "logits", "softmax", "next"]

    def test_the_logits_are_the_models_own_and_the_words_those_of_generation(self):
        walk, trained = hello(), loaded("en-es")
        source, target = walk["encoder", "tokens"].values, walk["decoder", "start"].values
        with torch.no_grad():
            logits = trained.model(source[None], target[None])[0]
        assert torch.equal(walk["decoder", "logits"].values, logits)
        ids, _ = encode_sources(trained.tokenizer, ["Hello world"]).padded(torch.tensor([0]), fill=0)
        assert torch.equal(source, ids[0])
        made = generate(
            trained.model,
            ids,
            strategy=Greedy(),
            max_new_tokens=20,
            decoder_start_ids=trained.tokenizer.bos_id,
            stop_ids=2,
        )
        assert [step.token.id for step in walk.predictions] == made.sequence(0, with_stop=True).tolist()
        one_by_one = [step.token.probability for step in walk.predictions]
        assert one_by_one == pytest.approx(made.log_probs[0, 0].exp().tolist(), rel=1e-4)
        for row, step in zip(logits.softmax(-1), walk.predictions, strict=True):
            best = row.topk(5)
            assert [word.id for word in step.top] == best.indices.tolist()
            assert [word.probability for word in step.top] == best.values.tolist()

    def test_weights_are_those_of_look(self):
        walk, model = hello(), loaded("en-es").model
        with torch.no_grad(), analysis.trace(model) as t:
            model(walk["encoder", "tokens"].values[None], walk["decoder", "start"].values[None])
        assert len(t.paths) == 12
        for path in t.paths:
            assert torch.equal(walk[path, "weights"].values, t.weights(path)[0])
            assert torch.equal(walk[path, "heads"].values, t.heads(path)[0])

    def test_each_station_follows_from_its_sources(self):
        """Attention, feed-forward and sums, written out in float64 with the model's matrices."""
        walk, model = hello(), loaded("en-es").model
        modules = dict(model.named_modules())
        tried = dict.fromkeys(("q", "k", "v", "scores", "weights", "heads", "out", "norm", "hidden", "add"), 0)
        for step in walk.steps:
            given = [walk.steps[i].values.double() for i in step.sources]
            wanted = expected(step, given, modules, walk)
            if wanted is None:
                continue
            tried[step.role] += 1
            close = {"rtol": 0, "atol": 64 * EPS * float(wanted[wanted.isfinite()].abs().max())}
            torch.testing.assert_close(step.values.double(), wanted, **close, msg=str(step.module))
        assert tried == {**dict.fromkeys(ATTENTION[:4], 12), "weights": 12, "heads": 12, "out": 12} | {
            "norm": 22,
            "hidden": 8,
            "add": 20,
        }

    def test_the_residual_stream_adds_up_to_the_bit(self):
        walk = hello()
        for step in walk.steps:
            if step.role == "add":
                first, second = (walk.steps[i].values for i in step.sources)
                assert torch.equal(first + second, step.values)

    def test_what_is_particular_is_said(self):
        walk = hello()
        assert walk["encoder.norm", "norm"].note.startswith("This is the memory")
        assert walk["encoder.blocks.2", "norm"].note.startswith("Pre-norm")
        assert walk["decoder.norm", "norm"].note == ""

    def test_masks_say_who_may_attend(self):
        walk = hello()
        T, S = walk.sizes["T"], walk.sizes["S"]
        assert torch.equal(walk["decoder.blocks.1.attention", "mask"].values[0], torch.ones(T, T).tril().bool())
        assert walk["decoder.blocks.1.cross_attention", "mask"].values.shape == (1, T, S)
        assert walk["decoder.blocks.1.cross_attention", "mask"].values.all()
        assert walk["decoder.blocks.1.attention", "mask"].branch == "masked self-attention"
        assert "copy the answer" in walk["decoder.blocks.1.attention", "mask"].explanation

    def test_the_model_is_left_as_it_was(self):
        hello()
        for module in loaded("en-es").model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks

    def test_for_programs(self):
        walk = hello()
        found = json.loads(json.dumps(walk.to_dict(), allow_nan=False))
        assert found["title"] == walk.title
        assert found["sizes"] == walk.sizes
        assert len(found["steps"]) == len(walk.steps)
        assert [section["order"] for section in found["sections"] if section["block"] is not None] == ["pre-norm"] * 8
        x = walk["encoder", "embedding"]
        told = found["steps"][walk.steps.index(x)]
        assert told["shape"] == [4, 256]
        assert told["symbols"] == ["S", "M"]
        assert told["values"][1][:3] == [float(f"{value:.4g}") for value in x.values[1, :3].tolist()]
        assert told["norms"] == [float(f"{value:.4g}") for value in x.values.norm(dim=-1).tolist()]


def expected(step, given, modules, walk):
    """What a station's values are by its equation, from those of its sources; None where there is no such equation."""
    module = modules.get(step.module)
    if step.role in ("q", "k", "v"):
        H, D = step.shape[0], step.shape[-1]
        return linear(module, given[0]).unflatten(-1, (H, D)).transpose(0, 1)
    if step.role == "scores":
        return given[0] @ given[1].mT / math.sqrt(given[0].shape[-1])
    if step.role == "weights":
        scores = walk.steps[walk.steps[step.sources[0]].sources[0]].values.double()
        return scores.masked_fill(given[0] == 0, -math.inf).softmax(-1)
    if step.role == "heads":
        return given[0] @ given[1]
    if step.role == "out":
        return linear(module, given[1].transpose(0, 1).flatten(1))
    if step.role == "norm":
        x = given[0]
        spread = (x.var(-1, keepdim=True, unbiased=False) + module.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * module.weight.detach().double() + module.bias.detach().double()
    if step.role == "hidden":
        h = linear(module.up, given[0])
        return h / 2 * (1 + torch.erf(h / math.sqrt(2)))
    return given[0] + given[1] if step.role == "add" else None


def linear(module, x):
    return x @ module.weight.detach().double().T + module.bias.detach().double()


class TestOrders:
    """A block's order is read from the run: nothing tells the walk which it is."""

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
    def test_pre_post_and_parallel(self, residual, order, block, sums):
        model = shaken(DecoderConfig(**SIZES, n_layers=2, residual=residual, activation=GELU()).build())
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 7)))
        for i in range(2):
            assert roles(walk, f"blocks.{i}") == block
            adds = [one.formula for one in walk.steps if one.section == f"blocks.{i}" and one.role == "add"]
            assert adds == [f"x = x + {part}" for part in sums]
        assert [section.order for section in walk.sections if section.block is not None] == [order] * 2
        with torch.no_grad():
            assert torch.equal(walk["", "logits"].values, model(walk["", "tokens"].values[None])[0])

    def test_blocks_that_change_nothing_yet_are_shown(self):
        model = shaken(DecoderConfig(**SIZES, n_layers=1).build())
        for layer in (model.blocks[0].attention.o_proj, model.blocks[0].feed_forward.down):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 7)))
        assert roles(walk, "blocks.0") == ["norm", *ATTENTION, "norm", *FEED_FORWARD]  # x + 0 is x

    def test_a_llama(self):
        rotary = {"positions": Rotary(), "n_kv_heads": 2, "norm": RMSNorm(), "activation": SwiGLU(), "bias": False}
        walk = analysis.build_walkthrough(
            shaken(DecoderConfig(**SIZES, n_layers=1, **rotary).build()), torch.randint(31, (1, 7))
        )
        assert "between" not in roles(walk, "blocks.0")
        assert walk["blocks.0", "k"].symbols == ("K", "T", "D")
        assert walk["blocks.0", "k"].shape == (2, 7, 6)
        assert walk["blocks.0", "q"].formula == "q = h W_Q"
        assert walk["blocks.0", "q"].note.startswith("Rotated by an angle")
        assert not walk["blocks.0", "v"].note
        assert walk["blocks.0", "norm"].formula == "h = x / √(mean(x²) + ε) · γ"

    @pytest.mark.parametrize("positions", [ALiBi(), RelativeBias()])
    def test_a_bias_of_distances_is_no_memory(self, positions):
        sizes = SIZES | {"n_encoder_layers": 1, "n_decoder_layers": 1, "positions": positions}
        model = shaken(EncoderDecoderConfig(**sizes).build())
        walk = analysis.build_walkthrough(model, torch.randint(31, (1, 5)), torch.randint(31, (1, 7)))
        branches = [one.branch for one in walk.steps if one.role == "q"]
        assert branches == ["self-attention", "masked self-attention", "cross-attention"]
        assert walk["decoder.blocks.0.attention", "scores"].formula == "scores = q kᵀ / √D + bias"
        k = walk["decoder.blocks.0.cross_attention", "k"]
        assert k.formula.startswith("k = memory W_K")
        assert walk.steps[k.sources[0]].module == "encoder.norm"
        bias = walk["decoder.positions", "bias"].values
        own = walk["decoder.blocks.0.attention", "scores"]
        q, k = (walk.steps[i].values for i in own.sources[:2])
        torch.testing.assert_close(own.values, q @ k.mT / math.sqrt(6) + bias, rtol=0, atol=1e-5)

    def test_an_encoder_ends_in_vectors(self):
        sizes = SIZES | {"residual": PostNorm(), "embedding_norm": True, "n_segments": 2}
        model = shaken(EncoderConfig(**sizes, n_layers=1, positions=LearnedPositions(max_len=13)).build())
        ids = torch.randint(31, (1, 7))
        walk = analysis.build_walkthrough(model, ids)
        assert roles(walk, "") == ["tokens", "embedding", "between", "position", "norm", "vectors"]
        assert walk["", "between"].note == "The same vector was added to every token."
        with torch.no_grad():
            assert torch.equal(walk.steps[-1].values, model(ids)[0])

    def test_a_picture(self):
        model = shaken(
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


def test_a_text_as_long_as_the_model():
    """256 tokens are read at most, the last of which is the last but one that is written."""
    walk = analysis.build_walkthrough(loaded("shakespeare"), "x" * 254)
    assert (walk.sizes["T"], len(walk.predictions)) == (256, 3)
    told = walk.to_dict()["steps"][walk.steps.index(walk["blocks.0", "weights"])]
    assert told["pooled"] is True
    assert (len(told["values"][0]), len(told["values"][0][0])) == (64, 64)
    weights = walk["blocks.0", "weights"].values
    assert told["values"][3][63][1] == pytest.approx(float(weights[3, 252:, 4:8].mean()), rel=1e-3)


class TestOthersModels:
    def test_a_foreign_folder_walks_as_the_model_it_was_made_of(self, tmp_path):
        hub.export(loaded("shakespeare"), tmp_path / "out")
        ours, theirs = (
            analysis.build_walkthrough(one, "ROMEO:") for one in (loaded("shakespeare"), hub.pipeline(tmp_path / "out"))
        )
        assert theirs.title == ours.title
        assert [one.role for one in theirs.steps] == [one.role for one in ours.steps]
        assert_equal_up_to_rounding(theirs["", "logits"].values, ours["", "logits"].values)

    def test_a_foreign_encoder_with_its_tokenizer(self, reader):  # noqa: F811
        trained = hub.pipeline(reader)
        walk = analysis.build_walkthrough(trained, "the quick brown fox")
        assert "".join(walk.steps[0].rows) == "the quick brown fox"
        assert walk["", "tokens"].values.tolist() == trained.tokenizer.prompt("the quick brown fox")
        assert walk.steps[-1].role == "vectors"
        assert walk.predictions == []

    def test_torchs_encoder(self):
        layer = nn.TransformerEncoderLayer(24, 4, 23, batch_first=True)
        model = shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        x = torch.randn(1, 7, 24)
        walk = analysis.build_walkthrough(model, x)
        assert roles(walk, "layers.1") == [*ATTENTION, "add", "norm", "linear", "between", "linear", "add", "norm"]
        assert walk.sections[-1].order == "post-norm" or walk.sections[-2].order == "post-norm"
        with torch.no_grad():
            torch.testing.assert_close(walk.steps[-1].values, model(x)[0])

    @pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
    def test_models_of_transformers_as_they_are(self, name):
        key = next(key for key in PEERS if key.replace("-", "_").startswith(name))
        peer = PEERS[key]
        model = peer.build().float().eval()
        ids = torch.randint(31, (1, 7))
        walk = analysis.build_walkthrough(model, ids)
        with torch.no_grad():
            assert torch.equal(walk["", "logits"].values, model(ids).logits[0].float())
        assert sum(one.role == "weights" for one in walk.steps) == 2
        assert sum(one.role == "add" for one in walk.steps if one.section.endswith(".0")) >= 1


class TestText:
    def test_one_block_of_each_stack_in_full(self):
        text = hello().text()
        assert len(text.splitlines()) < 700
        assert "decoder.blocks.0.cross_attention" in text
        assert "decoder.blocks.1.cross_attention" not in text
        assert text.count("steps with the same roles") == 6
        other = hello().text(layer="decoder.blocks.2", head=3)
        assert "decoder.blocks.2.cross_attention" in other
        assert "head 3 of 8" in other
        assert other.count("steps with the same roles") == 7

    def test_the_numbers_are_printed(self):
        walk, text = hello(), hello().text(head=5)
        weights = walk["encoder.blocks.0", "weights"].values[5]
        for row in weights:
            assert "  ".join(f"{value:.2f}".rjust(4) for value in row[:2].tolist())[:4] in text
        assert f"mundo █ {walk.predictions[2].token.probability:.3f}" in text
        assert f"norm {float(walk['encoder', 'position'].values[0].norm()):.3g}" in text

    def test_why_is_said_once(self):
        assert hello().text().count("This is the only place where") == 1


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")
def test_the_page_in_a_browser(tmp_path):
    walk = hello()
    found = opened(tmp_path, walk.html(), "walk.js")
    assert found["title"] == walk.title
    assert found["start"] == "0. Characters"
    assert found["next"] == "1. Tokens and their ids"
    assert {"Encoder block 0: Self-attention", "Decoder block 0: Masked self-attention"} < set(found["nodes"])
    assert {"Encoder block 3: Encoder block 3", "Out of the decoder: Next token"} < set(found["nodes"])
    assert (found["skips"], found["memory"], found["loop"]) == (5, 4, 1)
    assert found["clicked"][1] == "Decoder block 0 · pre-norm · cross-attention"
    weights = walk["decoder.blocks.0.cross_attention", "weights"].values
    assert found["softmax"][1:] == [
        "Head 3 of 8",
        [[f"{float(f'{v:.4g}'):.2f}" for v in row] for row in weights[3].tolist()],
    ]
    assert found["softmax"][0] == f"{walk.steps.index(walk['decoder.blocks.0.cross_attention', 'weights'])}. Softmax"
    below = walk.steps.index(walk["decoder.blocks.1.cross_attention", "weights"])
    assert found["below"] == [f"{below}. Softmax", "Decoder block 1 · pre-norm · cross-attention", f"{below}/3"]
    assert found["folded"] == [f"{stack} block {i}" for stack in ("Encoder", "Decoder") for i in (0, 2, 3)]
    assert found["head"] == "Head 4 of 8"
    assert found["entered"] == "0. Characters"
    assert found["end"].endswith("The next token")
    assert found["written"] == [step.token.token.strip() for step in walk.predictions]
    assert [[line[0] for line in table] for table in found["likeliest"]] == [
        [word.token.strip() or word.token for word in step.top] for step in walk.predictions
    ]
    assert all(table[0][2] == "taken" for table in found["likeliest"])
    assert found["help"] is True
    assert found["paper"] == 1 + 3 + 14 + 1 + 3 + 24 + 4
    assert found["wide"] is True


def test_in_a_notebook_and_as_one_file():
    page = analysis.build_walkthrough(loaded("sort-dedup"), "D A A").html()
    assert "default-src 'none'" in page
    assert "http://www.w3.org/2000/svg" in page
    assert "https://" not in page
    shown = analysis.build_walkthrough(loaded("sort-dedup"), "D A A")._repr_html_()
    assert shown.startswith("<iframe srcdoc=")


@pytest.mark.bad_input
def test_what_is_not_there_is_said():
    with pytest.raises(ClearheadError, match="no step 'wights' in encoder; the roles are: characters"):
        hello()["encoder", "wights"]
    with pytest.raises(ClearheadError, match="there is no head 8; expected 0 to 7"):
        hello().text(head=8)
    with pytest.raises(ClearheadError, match="Linear has no attention that can be recorded"):
        analysis.build_walkthrough(nn.Linear(3, 5), torch.randn(1, 7, 3))
