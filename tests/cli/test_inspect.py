"""`clearhead inspect`: every task, every view, and mistakes. Nothing here depends on what a shipped model says."""

from __future__ import annotations

import re

import pytest
import torch

from clearhead import hub
from clearhead.analysis import model_inputs, trace
from clearhead.cli.inspect import DEEPER, View
from clearhead.data.tasks.translation import encode_sources, encode_targets

SENTENCE = "The cat sat on the mat."


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A grey bar on black, as a PNG of another size than the model's."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (50, 70), 10)
    ImageDraw.Draw(image).rectangle((20, 10, 30, 60), fill=240)
    path = tmp_path_factory.mktemp("pictures") / "bar.png"
    image.save(path)
    return path


class TestText:
    def test_translation_shows_what_ran(self, cli):
        """The weights in the JSON against a trace of our own, for the tokens that it names."""
        found = cli("inspect", "en-es", SENTENCE, "--layer", 2, "--head", 3, "--json").json
        source, target = found["title"].split(" → ")
        assert source == SENTENCE
        trained = hub.pipeline("en-es")
        assert target == hub.translate(trained, [SENTENCE])[0]
        tokenizer = trained.tokenizer
        src, _ = encode_sources(tokenizer, [source]).padded(torch.tensor([0]), fill=tokenizer.pad_id)
        tgt, _ = encode_targets(tokenizer, [target]).padded(torch.tensor([0]), fill=tokenizer.pad_id)
        path = "decoder.blocks.2.cross_attention"
        with torch.no_grad(), trace(trained.model, f"{path}.weights") as t:
            trained.model(src, tgt[:, :-1])
        assert found["shown"]["path"] == path
        torch.testing.assert_close(torch.tensor(found["shown"]["weights"]), t.weights(path)[0, 3])
        layer = next(one for one in found["layers"] if one["path"] == path)
        assert layer["rows"] == tokenizer.tokens(tgt[0, 1:])
        assert layer["columns"] == tokenizer.tokens(src[0])
        assert 0 <= layer["difference"] <= layer["tolerance"]
        assert all(0 <= score <= 1.0001 for head in layer["heads"] for score in head["scores"].values())
        assert len(found["norms"]) == sum(1 for one in found["layers"] if one["kind"] == "self")

    def test_in_the_terminal(self, cli):
        ran = cli("inspect", "en-es", SENTENCE)
        assert ran.code == 0
        assert ran.out.startswith(f"{SENTENCE} → ")
        assert re.search(r"Cross-attention, layer \d, mean of \d+ heads", ran.out)
        assert "cat" in ran.out
        assert re.search(r"head +pattern +score +entropy +distance", ran.out)
        assert "recomputed weights × values differ" in ran.out

    def test_a_layer_by_its_path(self, cli):
        found = cli("inspect", "en-es", SENTENCE, "--layer", "encoder.blocks.1.attention", "--json").json
        assert found["shown"]["path"] == "encoder.blocks.1.attention"
        rows = torch.tensor(found["shown"]["weights"]).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))

    def test_a_text_is_seen_causally(self, cli):
        found = cli("inspect", "shakespeare", "KING:\nwhat now", "--json").json
        weights = torch.tensor(found["shown"]["weights"])
        assert weights.shape == (14, 14)
        assert weights.triu(1).abs().max() == 0
        assert found["layers"][0]["rows"][:6] == ["K", "I", "N", "G", ":", "⏎"]
        assert "next_token" in found["metadata"]

    def test_sorting_goes_on_to_the_answer(self, cli):
        found = cli("inspect", "sort-dedup", "D A A", "--json").json
        assert found["title"].startswith("D A A → ")
        assert found["layers"][0]["rows"][:4] == ["D", "A", "A", "<START>"]
        assert found["layers"][0]["rows"][4:] == found["title"].removeprefix("D A A → ").split()

    def test_translate_look(self, cli):
        ran = cli("translate", SENTENCE, "--attention", "--beam", 1)
        assert ran.code == 0
        lines = ran.out.splitlines()
        assert "cat" in lines[2].split()
        assert "Cross-attention, layer" in ran.out


class TestPictures:
    def test_a_picture_is_made_grey_and_small(self, cli, picture, tmp_path):
        ran = cli("inspect", "digits-vit", picture, "--html", tmp_path / "a.html", "--out", tmp_path / "a.png")
        assert ran.code == 0
        assert re.match(r"bar\.png → \d\n", ran.out)
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert '"height":32' in (tmp_path / "a.html").read_text(encoding="utf-8")
        shown = cli("inspect", "digits-vit", picture, "--query", 27).out
        # The bar stands in the middle third of the picture, from top to bottom.
        assert sum("█" in line[10:22] for line in shown.splitlines()) >= 8
        found = cli("inspect", "digits-vit", picture, "--json").json
        assert found["layers"][0]["kind"] == "image"
        assert found["layers"][0]["rows"][9] == "(1, 1)"

    def test_a_picture_of_the_data(self, cli, tmp_path):
        import numpy as np

        pixels = np.zeros((3, 32, 32), dtype=np.uint8)
        pixels[2, 8:24, 8:24] = 200
        labels = np.array([0, 1, 2])
        np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
        ran = cli("inspect", "digits-vit", 2, "--data", tmp_path / "d.npz")
        assert ran.code == 0
        assert "▓" in ran.out
        wrong = cli("inspect", "digits-vit", 3, "--data", tmp_path / "d.npz")
        assert "expected an index from 0 to 2" in wrong.err


@pytest.mark.parametrize("view", [view for view in View if view is not View.patches])
def test_every_view_has_a_text_and_a_figure(cli, view, tmp_path):
    given = ("sort-dedup", "C A B A", "--view", view, *(("--corrupted", "C A B B") if view is View.patching else ()))
    shown = cli("inspect", *given)
    assert shown.code == 0, shown.err
    assert len(shown.out.splitlines()) > 4
    assert view not in DEEPER or max(map(len, shown.out.splitlines())) <= 80
    drawn = cli("inspect", *given, "--out", tmp_path / "a.svg")
    assert drawn.code == 0
    assert (tmp_path / "a.svg").stat().st_size > 3000
    assert "written to" in drawn.out


class TestDeeper:
    """What the views print against what the functions behind them find."""

    def test_lens(self, cli):
        found = cli("inspect", "shakespeare", "To be", "--view", "lens", "--json").json
        trained = hub.pipeline("shakespeare")
        asked = model_inputs(trained, "To be")
        with torch.no_grad():
            said = trained.model(*asked.args)[0].argmax(-1).tolist()
        assert [place[0]["id"] for place in found["layers"][-1]["predictions"]] == said
        assert len(found["layers"]) == len(trained.model.blocks) + 1
        shown = cli("inspect", "shakespeare", "To be", "--view", "lens").out.splitlines()
        top = next(line for line in shown if line.startswith("layer")).split()[2:]
        assert top == trained.tokenizer.tokens(said)

    def test_attribution_of_a_translation(self, cli, tmp_path):
        given = (
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
        found = cli(*given, "--json", "--html", tmp_path / "a.html").json
        assert found["title"].startswith("Why gato rather than perro after El? ")
        assert sum(part["value"] for part in found["parts"]) == pytest.approx(found["logit"], abs=1e-4)
        assert found["logit"] > 1
        assert {part["kind"] for part in found["parts"]} == {"embedding", "head", "feed-forward", "bias"}
        assert "Contribution of each head" in (tmp_path / "a.html").read_text(encoding="utf-8")

    def test_patching_the_source(self, cli):
        """What makes gato of a dog that becomes a cat is the word cat, and nothing else of the source."""
        given = ("inspect", "en-es", SENTENCE, "--corrupted", SENTENCE.replace("cat", "dog"), "--query", 1, "--json")
        found = cli(*given, "--modules", "encoder.blocks.*", "--target-token", "gato").json
        values = torch.tensor(found["values"], dtype=torch.float64)
        restored = (values - found["baseline"]) / (found["clean"] - found["baseline"])
        assert restored.argmax(-1).tolist() == [1] * len(restored)
        heads = cli(*given, "--granularity", "head").json
        assert heads["granularity"] == "head"

    def test_a_picture(self, cli, picture):
        found = cli("inspect", "digits-vit", picture, "--view", "attribution", "--json").json
        assert sum(part["value"] for part in found["parts"]) == pytest.approx(found["logit"], abs=1e-3)
        assert cli("inspect", "digits-vit", picture, "--view", "ablation", "--granularity", "module").code == 0

    def test_a_module_by_its_factory(self, cli, tmp_path, monkeypatch):
        (tmp_path / "toy_to_look_at.py").write_text(
            "import torch\nfrom clearhead.models import Decoder, DecoderConfig\n\n\ndef make():\n"
            "    torch.manual_seed(0)\n"
            "    return Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2))\n\n\n"
            "def own():\n    return torch.nn.Sequential(make())\n",
            encoding="utf-8",
        )
        monkeypatch.chdir(tmp_path)
        found = cli("inspect", "toy_to_look_at:make", "3 1 4 1 5", "--json").json
        assert found["layers"][0]["rows"] == ["3", "1", "4", "1", "5"]
        drawn = cli(
            "inspect", "toy_to_look_at:own", "--vocab-size", 31, "--length", 7, "--seed", 3, "--view", "lens", "--json"
        ).json
        assert drawn["positions"] == list(range(7))
        patched = cli("inspect", "toy_to_look_at:make", "3 1 4 1 5", "--corrupted", "3 1 4 2 5", "--json").json
        assert patched["rows"] == ["blocks.0", "blocks.1"]
        unknown = cli("inspect", "toy_to_look_at:own", "--view", "lens")
        assert unknown.code == 1
        assert "--vocab-size" in unknown.err
        assert "expected token ids from 0 to 30" in cli("inspect", "toy_to_look_at:make", "3 31").err


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "words"),
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
        (["en-es", SENTENCE, "--layer", "9"], "there is no layer '9'; expected 0 to"),
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
        (["digits-vit", "nowhere.png"], "there is no image file nowhere.png"),
        (["digits-vit", __file__], "cannot be read as an image"),
        (["digits-conv", __file__], "has no attention; choose a Transformer"),
        (["en_es", SENTENCE], "did you mean 'en-es'?"),
    ],
)
def test_a_mistake_is_one_line(cli, arguments, words):
    ran = cli("inspect", *arguments)
    assert ran.code == 1
    assert ran.err.startswith("clearhead: ")
    assert ran.err.count("\n") == 1
    assert words in ran.err


def test_the_pieces_that_were_written_are_shown(cli):
    """The model writes openso as o, p, ens, o; the tokenizer would cut that word into op, ens, o."""
    sentence, pieces = "She plays the glockenspiel.", ["o", "p", "ens", "o"]
    layers = cli("inspect", "en-es", sentence, "--json").json["layers"]
    rows = next(layer["rows"] for layer in layers if layer["kind"] == "cross")
    assert [row.strip() for row in rows][3:7] == pieces
    drawn = cli("translate", sentence, "--attention").out.splitlines()
    first = next(i for i, line in enumerate(drawn) if line.split()[:1] == ["o"])
    assert [line.split()[0] for line in drawn[first : first + 4]] == pieces
