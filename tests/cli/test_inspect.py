"""`clearhead inspect`: every task, every view, and invalid input. No test depends on predictions of a bundled model."""

from __future__ import annotations

import re

import pytest
import torch

from clearhead import hub
from clearhead.analysis import model_inputs, trace
from clearhead.cli.inspect import DEEPER, View
from clearhead.data.tasks.translation import encode_sources, encode_targets

SENTENCE = "The cat sat on the mat."


class TestText:
    def test_inspect_translation_equals_a_trace(self, cli):
        """The weights in the JSON equal those of a trace with the same tokens."""
        result = cli("inspect", "en-es", SENTENCE, "--layer", 2, "--head", 3, "--json").json
        source, target = result["title"].split(" → ")
        assert source == SENTENCE
        trained = hub.pipeline("en-es")
        assert target == hub.translate(trained, [SENTENCE])[0]
        tokenizer = trained.tokenizer
        src, _ = encode_sources(tokenizer, [source]).padded(torch.tensor([0]), fill=tokenizer.pad_id)
        tgt, _ = encode_targets(tokenizer, [target]).padded(torch.tensor([0]), fill=tokenizer.pad_id)
        path = "decoder.blocks.2.cross_attention"
        with torch.no_grad(), trace(trained.model, f"{path}.weights") as t:
            trained.model(src, tgt[:, :-1])
        assert result["shown"]["path"] == path
        torch.testing.assert_close(torch.tensor(result["shown"]["weights"]), t.weights(path)[0, 3])
        layer = next(entry for entry in result["layers"] if entry["path"] == path)
        assert layer["rows"] == tokenizer.tokens(tgt[0, 1:])
        assert layer["columns"] == tokenizer.tokens(src[0])
        assert 0 <= layer["difference"] <= layer["tolerance"]
        assert all(0 <= score <= 1.0001 for head in layer["heads"] for score in head["scores"].values())
        assert len(result["norms"]) == sum(1 for entry in result["layers"] if entry["kind"] == "self")

    def test_inspect_prints_map_heads_and_rounding(self, cli):
        ran = cli("inspect", "en-es", SENTENCE)
        assert ran.code == 0
        assert ran.out.startswith(f"{SENTENCE} → ")
        assert re.search(r"Cross-attention, layer \d, mean of \d+ heads", ran.out)
        assert "cat" in ran.out
        assert re.search(r"head +pattern +score +entropy +distance", ran.out)
        assert "recomputed weights × values differ" in ran.out

    def test_inspect_accepts_a_layer_path(self, cli):
        result = cli("inspect", "en-es", SENTENCE, "--layer", "encoder.blocks.1.attention", "--json").json
        assert result["shown"]["path"] == "encoder.blocks.1.attention"
        rows = torch.tensor(result["shown"]["weights"]).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))

    def test_inspect_of_a_language_model_is_causal(self, cli):
        result = cli("inspect", "shakespeare", "KING:\nwhat now", "--json").json
        weights = torch.tensor(result["shown"]["weights"])
        assert weights.shape == (14, 14)
        assert weights.triu(1).abs().max() == 0
        assert result["layers"][0]["rows"][:6] == ["K", "I", "N", "G", ":", "⏎"]
        assert "next_token" in result["metadata"]

    def test_inspect_of_sorting_includes_the_answer(self, cli):
        result = cli("inspect", "sort-dedup", "D A A", "--json").json
        assert result["title"].startswith("D A A → ")
        assert result["layers"][0]["rows"][:4] == ["D", "A", "A", "<START>"]
        assert result["layers"][0]["rows"][4:] == result["title"].removeprefix("D A A → ").split()

    def test_translate_attention_draws_a_heatmap(self, cli):
        ran = cli("translate", SENTENCE, "--attention", "--beam", 1)
        assert ran.code == 0
        lines = ran.out.splitlines()
        assert "cat" in lines[2].split()
        assert "Cross-attention, layer" in ran.out


class TestImages:
    def test_inspect_converts_images_to_the_input_of_the_model(self, cli, picture, tmp_path):
        ran = cli("inspect", "digits-vit", picture, "--html", tmp_path / "a.html", "--out", tmp_path / "a.png")
        assert ran.code == 0
        assert re.match(r"bar\.png → \d\n", ran.out)
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert '"height":32' in (tmp_path / "a.html").read_text(encoding="utf-8")
        output = cli("inspect", "digits-vit", picture, "--query", 27).out
        # The bar is in the middle third of the image, from top to bottom.
        assert sum("█" in line[10:22] for line in output.splitlines()) >= 8
        result = cli("inspect", "digits-vit", picture, "--json").json
        assert result["layers"][0]["kind"] == "image"
        assert result["layers"][0]["rows"][9] == "(1, 1)"

    def test_inspect_selects_images_of_a_data_set_by_index(self, cli, tmp_path):
        import numpy as np

        pixels = np.zeros((3, 32, 32), dtype=np.uint8)
        pixels[2, 8:24, 8:24] = 200
        labels = np.array([0, 1, 2])
        np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
        ran = cli("inspect", "digits-vit", 2, "--data", tmp_path / "d.npz")
        assert ran.code == 0
        assert "▓" in ran.out
        invalid = cli("inspect", "digits-vit", 3, "--data", tmp_path / "d.npz")
        assert "expected an index from 0 to 2" in invalid.err


@pytest.mark.parametrize("view", [view for view in View if view is not View.patches])
def test_every_view_has_terminal_output_and_a_figure(cli, view, tmp_path):
    arguments = (
        "sort-dedup",
        "C A B A",
        "--view",
        view,
        *(("--corrupted", "C A B B") if view is View.patching else ()),
    )
    printed = cli("inspect", *arguments)
    assert printed.code == 0, printed.err
    assert len(printed.out.splitlines()) > 4
    assert view not in DEEPER or max(map(len, printed.out.splitlines())) <= 80
    drawn = cli("inspect", *arguments, "--out", tmp_path / "a.svg")
    assert drawn.code == 0
    assert (tmp_path / "a.svg").stat().st_size > 3000
    assert "written to" in drawn.out


class TestInterpretabilityViews:
    """The output of the views equals that of the functions."""

    def test_lens_equals_the_predictions_of_the_model(self, cli):
        result = cli("inspect", "shakespeare", "To be", "--view", "lens", "--json").json
        trained = hub.pipeline("shakespeare")
        inputs = model_inputs(trained, "To be")
        with torch.no_grad():
            predictions = trained.model(*inputs.args)[0].argmax(-1).tolist()
        assert [candidates[0]["id"] for candidates in result["layers"][-1]["predictions"]] == predictions
        assert len(result["layers"]) == len(trained.model.blocks) + 1
        output = cli("inspect", "shakespeare", "To be", "--view", "lens").out.splitlines()
        top = next(line for line in output if line.startswith("layer")).split()[2:]
        assert top == trained.tokenizer.tokens(predictions)

    def test_attribution_of_a_translation_sums_to_the_logit(self, cli, tmp_path):
        arguments = (
            "inspect",
            "en-es",
            SENTENCE,
            "--view",
            "attribution",
            "--query",
            1,
            "--target-token",
            "gato",
            "--baseline-token",
            "perro",
        )
        result = cli(*arguments, "--json", "--html", tmp_path / "a.html").json
        assert result["title"].startswith("Why gato rather than perro after El? ")
        assert sum(part["value"] for part in result["parts"]) == pytest.approx(result["logit"], abs=1e-4)
        assert result["logit"] > 1
        assert {part["kind"] for part in result["parts"]} == {"embedding", "head", "feed-forward", "bias"}
        assert "Contribution of each head" in (tmp_path / "a.html").read_text(encoding="utf-8")

    def test_patching_the_source_restores_the_token_at_the_changed_word(self, cli):
        """Only the source word "cat" restores "gato" in a sentence about a dog."""
        arguments = (
            "inspect",
            "en-es",
            SENTENCE,
            "--corrupted",
            SENTENCE.replace("cat", "dog"),
            "--query",
            1,
            "--json",
        )
        result = cli(*arguments, "--modules", "encoder.blocks.*", "--target-token", "gato").json
        values = torch.tensor(result["values"], dtype=torch.float64)
        restored = (values - result["baseline"]) / (result["clean"] - result["baseline"])
        assert restored.argmax(-1).tolist() == [1] * len(restored)
        heads = cli(*arguments, "--granularity", "head").json
        assert heads["granularity"] == "head"

    def test_attribution_of_an_image_sums_to_the_logit(self, cli, picture):
        result = cli("inspect", "digits-vit", picture, "--view", "attribution", "--json").json
        assert sum(part["value"] for part in result["parts"]) == pytest.approx(result["logit"], abs=1e-3)
        assert cli("inspect", "digits-vit", picture, "--view", "ablation", "--granularity", "module").code == 0

    def test_inspect_accepts_module_factories(self, cli, tmp_path, monkeypatch):
        (tmp_path / "toy_module.py").write_text(
            "import torch\nfrom clearhead.models import Decoder, DecoderConfig\n\n\ndef make():\n"
            "    torch.manual_seed(0)\n"
            "    return Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2))\n\n\n"
            "def wrapped():\n    return torch.nn.Sequential(make())\n\n\n"
            "def table():\n    return torch.nn.Embedding(31, 5)\n\n\n"
            "def linear():\n    return torch.nn.Linear(5, 3)\n",
            encoding="utf-8",
        )
        monkeypatch.chdir(tmp_path)
        result = cli("inspect", "toy_module:make", "3 1 4 1 5", "--json").json
        assert result["layers"][0]["rows"] == ["3", "1", "4", "1", "5"]
        drawn = cli(
            "inspect", "toy_module:wrapped", "--vocab-size", 31, "--length", 7, "--seed", 3, "--view", "lens", "--json"
        ).json
        assert drawn["positions"] == list(range(7))
        patched = cli("inspect", "toy_module:make", "3 1 4 1 5", "--corrupted", "3 1 4 2 5", "--json").json
        assert patched["rows"] == ["blocks.0", "blocks.1"]
        unknown = cli("inspect", "toy_module:wrapped", "--view", "lens")
        assert unknown.code == 1
        assert "--vocab-size" in unknown.err
        assert "expected token ids from 0 to 30" in cli("inspect", "toy_module:make", "3 31").err
        message = cli("inspect", "toy_module:table", "36", "--vocab-size", 37).err
        assert message.startswith("clearhead: toy_module:table could not be called with this input: IndexError: ")
        assert message.count("\n") == 1
        without_attention = cli("inspect", "toy_module:linear", "--input-dim", 5)
        assert "because it has no attention layers" in without_attention.err


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shakespeare", "ab", "--vocab-size", "7"], "are for a factory"),
        (["shakespeare", "--view", "lens"], "shakespeare needs an input"),
        (["shakespeare", "ab", "--view", "attribution", "--target-token", "zz"], "the vocabulary has no token 'zz'"),
        (["shakespeare", "ab", "--view", "patching"], "the patching view needs --corrupted"),
        (["shakespeare", "ab", "--view", "lens", "--corrupted", "cd"], "no other view takes it"),
        (["shakespeare", "ab", "--corrupted", "abc"], "pass two inputs of the same length"),
        (
            ["shakespeare", "ab", "--view", "ablation", "--granularity", "rows"],
            "expected 'position', 'head' or 'module'",
        ),
        (["shakespeare", "ab", "--view", "ablation", "--modules", "layers.*"], "no module of this model matches"),
        (["shakespeare", "ab", "--view", "lens", "--query", "9"], "position"),
        (["digits-vit", __file__, "--view", "vectors"], "no token embeddings"),
        (["en-es", " "], "pass a sentence to translate"),
        (["en-es", SENTENCE, "--layer", "9"], "unknown layer '9'; expected 0 to"),
        (["en-es", SENTENCE, "--head", "99"], "has no head 99"),
        (["en-es", SENTENCE, "--view", "patches"], "the patches view is for images"),
        (["en-es", SENTENCE, "--view", "contributions", "--query", "99"], "has no query 99; expected 0 to"),
        (["en-es", SENTENCE, "--out", "a.txt"], "expected a name ending in .png, .svg or .pdf"),
        (["en-es", SENTENCE, "--html", "/"], "the page cannot be written to /"),
        (["en-es", SENTENCE, "--out", f"{__file__}/a.png"], "the figure cannot be written to"),
        (["sort-dedup", ""], "pass letters separated by blanks"),
        (["sort-dedup", "D ß"], "not in the vocabulary"),
        (["shakespeare", ""], "has no tokens"),
        (["shakespeare", "x" * 300], "takes at most 256"),
        (["digits-vit", "nowhere.png"], "image file nowhere.png does not exist"),
        (["digits-vit", __file__], "cannot be read as an image"),
        (["digits-conv", __file__], "and no attention; choose a Transformer"),
        (["en_es", SENTENCE], "did you mean 'en-es'?"),
    ],
)
def test_invalid_input_is_a_one_line_error(cli, arguments, message):
    ran = cli("inspect", *arguments)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith("clearhead: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


def test_inspect_shows_the_generated_tokens_without_retokenizing(cli):
    """The model generates openso as o, p, ens, o; the tokenizer would encode it as op, ens, o."""
    sentence, pieces = "She plays the glockenspiel.", ["o", "p", "ens", "o"]
    layers = cli("inspect", "en-es", sentence, "--json").json["layers"]
    rows = next(layer["rows"] for layer in layers if layer["kind"] == "cross")
    assert [row.strip() for row in rows][3:7] == pieces
    drawn = cli("translate", sentence, "--attention").out.splitlines()
    first = next(i for i, line in enumerate(drawn) if line.split()[:1] == ["o"])
    assert [line.split()[0] for line in drawn[first : first + 4]] == pieces
