"""`clearhead look`: every task, every view, and mistakes. Nothing here depends on what a shipped model says."""

from __future__ import annotations

import re

import pytest
import torch

from clearhead import pretrained
from clearhead.cli.look import View
from clearhead.data.translation import encode_sources, encode_targets
from clearhead.look import trace

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
        found = cli("look", "en-es", SENTENCE, "--layer", 2, "--head", 3, "--json").json
        source, target = found["title"].split(" → ")
        assert source == SENTENCE
        trained = pretrained.load("en-es")
        assert target == pretrained.translate(trained, [SENTENCE])[0]
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
        ran = cli("look", "en-es", SENTENCE)
        assert ran.code == 0
        assert ran.out.startswith(f"{SENTENCE} → ")
        assert re.search(r"Cross-attention, layer \d, mean of \d+ heads", ran.out)
        assert "cat" in ran.out
        assert re.search(r"head +pattern +score +entropy +distance", ran.out)
        assert "recomputed weights × values differ" in ran.out

    def test_a_layer_by_its_path(self, cli):
        found = cli("look", "en-es", SENTENCE, "--layer", "encoder.blocks.1.attention", "--json").json
        assert found["shown"]["path"] == "encoder.blocks.1.attention"
        rows = torch.tensor(found["shown"]["weights"]).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))

    def test_a_text_is_seen_causally(self, cli):
        found = cli("look", "shakespeare", "KING:\nwhat now", "--json").json
        weights = torch.tensor(found["shown"]["weights"])
        assert weights.shape == (14, 14)
        assert weights.triu(1).abs().max() == 0
        assert found["layers"][0]["rows"][:6] == ["K", "I", "N", "G", ":", "⏎"]
        assert "expects next" in found["facts"]

    def test_sorting_goes_on_to_the_answer(self, cli):
        found = cli("look", "sort-dedup", "D A A", "--json").json
        assert found["title"].startswith("D A A → ")
        assert found["layers"][0]["rows"][:4] == ["D", "A", "A", "<START>"]
        assert found["layers"][0]["rows"][4:] == found["title"].removeprefix("D A A → ").split()

    def test_translate_look(self, cli):
        ran = cli("translate", SENTENCE, "--look", "--beam", 1)
        assert ran.code == 0
        lines = ran.out.splitlines()
        assert "cat" in lines[2].split()
        assert "Cross-attention, layer" in ran.out


class TestPictures:
    def test_a_picture_is_made_grey_and_small(self, cli, picture, tmp_path):
        ran = cli("look", "digits-vit", picture, "--html", tmp_path / "a.html", "--out", tmp_path / "a.png")
        assert ran.code == 0
        assert re.match(r"bar\.png → \d\n", ran.out)
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert '"height":32' in (tmp_path / "a.html").read_text(encoding="utf-8")
        shown = cli("look", "digits-vit", picture, "--row", 27).out
        # The bar stands in the middle third of the picture, from top to bottom.
        assert sum("█" in line[10:22] for line in shown.splitlines()) >= 8
        found = cli("look", "digits-vit", picture, "--json").json
        assert found["layers"][0]["kind"] == "image"
        assert found["layers"][0]["rows"][9] == "(1, 1)"

    def test_a_picture_of_the_data(self, cli, tmp_path):
        import numpy as np

        pixels = np.zeros((3, 32, 32), dtype=np.uint8)
        pixels[2, 8:24, 8:24] = 200
        labels = np.array([0, 1, 2])
        np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
        ran = cli("look", "digits-vit", 2, "--data", tmp_path / "d.npz")
        assert ran.code == 0
        assert "▓" in ran.out
        wrong = cli("look", "digits-vit", 3, "--data", tmp_path / "d.npz")
        assert "expected a number from 0 to 2" in wrong.err


@pytest.mark.parametrize("view", [view for view in View if view is not View.patches])
def test_every_view_has_a_text_and_a_figure(cli, view, tmp_path):
    shown = cli("look", "sort-dedup", "C A B A", "--view", view)
    assert shown.code == 0
    assert len(shown.out.splitlines()) > 4
    drawn = cli("look", "sort-dedup", "C A B A", "--view", view, "--out", tmp_path / "a.svg")
    assert drawn.code == 0
    assert (tmp_path / "a.svg").stat().st_size > 3000
    assert "written to" in drawn.out


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["en-es", " "], "nothing to translate"),
        (["en-es", SENTENCE, "--layer", "9"], "there is no layer '9'; expected 0 to"),
        (["en-es", SENTENCE, "--head", "99"], "has no head 99"),
        (["en-es", SENTENCE, "--view", "patches"], "patches are a view of pictures"),
        (["en-es", SENTENCE, "--view", "contributions", "--row", "99"], "has no query 99; expected 0 to"),
        (["en-es", SENTENCE, "--out", "a.txt"], "end it in .png, .svg or .pdf"),
        (["en-es", SENTENCE, "--html", "/"], "the page cannot be written to /"),
        (["en-es", SENTENCE, "--out", f"{__file__}/a.png"], "the figure cannot be written to"),
        (["sort-dedup", ""], "nothing to sort"),
        (["sort-dedup", "D ß"], "not in the vocabulary"),
        (["shakespeare", ""], "has no token"),
        (["shakespeare", "x" * 300], "takes 256 at most"),
        (["digits-vit", "nowhere.png"], "there is no picture nowhere.png"),
        (["digits-vit", __file__], "cannot be read as a picture"),
        (["digits-conv", __file__], "has no attention to look at"),
        (["en_es", SENTENCE], "did you mean 'en-es'?"),
    ],
)
def test_a_mistake_is_one_line(cli, arguments, words):
    ran = cli("look", *arguments)
    assert ran.code == 1
    assert ran.err.startswith("clearhead: ")
    assert ran.err.count("\n") == 1
    assert words in ran.err


def test_the_pieces_that_were_written_are_shown(cli):
    """The model writes openso as o, p, ens, o; the tokenizer would cut that word into op, ens, o."""
    sentence, pieces = "She plays the glockenspiel.", ["o", "p", "ens", "o"]
    layers = cli("look", "en-es", sentence, "--json").json["layers"]
    rows = next(layer["rows"] for layer in layers if layer["kind"] == "cross")
    assert [row.strip() for row in rows][3:7] == pieces
    drawn = cli("translate", sentence, "--look").out.splitlines()
    first = next(i for i, line in enumerate(drawn) if line.split()[:1] == ["o"])
    assert [line.split()[0] for line in drawn[first : first + 4]] == pieces
