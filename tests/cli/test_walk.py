"""`clearhead walk`: every kind of bundled Transformer, and one-line errors."""

from __future__ import annotations

import json

import pytest

HELLO = ["walk", "en-es", "Hello world"]


def test_walk_prints_all_sections(cli):
    ran = cli(*HELLO)
    assert ran.code == 0
    assert ran.out.startswith("Hello world → ")
    for words in ("H │ e │ l │ l │ o", "scores = q kᵀ / √D", "head 0 of 8", "masked self-attention", "next ="):
        assert words in ran.out
    assert "decoder.blocks.2.norm1" in cli(*HELLO, "--layer", "2", "--head", "7").out


def test_walk_page_contains_the_json_document(cli, tmp_path):
    ran = cli(*HELLO, "--html", tmp_path / "new" / "a.html", "--json")
    assert ran.json["steps"][0]["rows"] == list("Hello world")
    page = (tmp_path / "new" / "a.html").read_text(encoding="utf-8")
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == ran.json
    assert "written to" in cli("walk", "sort-dedup", "D A A", "--html", tmp_path / "b.html").out


@pytest.mark.parametrize(
    ("model", "text", "roles"),
    [
        ("shakespeare", "ROMEO:", {"characters", "tokens", "position", "mask", "logits", "next"}),
        ("sort-dedup", "D A A", {"characters", "tokens", "mask", "logits", "next"}),
        ("digits-vit", None, {"pixels", "patches", "position", "mask", "pool", "logits", "answer"}),
    ],
)
def test_walk_of_decoders_and_vision_transformers_contains_their_steps(cli, model, text, roles, picture):
    result = cli("walk", model, text or picture, "--json").json
    assert roles <= {step["role"] for step in result["steps"]}
    masked = {step["branch"] for step in result["steps"] if step["role"] == "mask"}
    assert masked == ({"self-attention"} if text is None else {"masked self-attention"})
    assert not any(step["role"] == "between" for step in result["steps"])
    assert result["title"].endswith(result["predictions"][0]["token"]["token"]) or text
    assert cli("walk", model, text or picture).code == 0


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.png", b"\x89PNG")])
def test_walk_writes_the_architecture(cli, tmp_path, name, start):
    path = tmp_path / name
    assert str(path) in cli("walk", "sort-dedup", "D A A", "--out", path, "--theme", "dark").out
    assert path.read_bytes().startswith(start)


def test_walk_generates_max_new_tokens(cli):
    result = cli("walk", "shakespeare", "ROMEO:", "--max-new-tokens", 3, "--json").json
    assert len(result["predictions"]) == 3
    assert [len(prediction["context"]) for prediction in result["predictions"]] == [6, 7, 8]
    assert result["sizes"]["T"] == 8


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["en-es", " "], "pass a sentence to translate"),
        (["en-es", "word " * 300], "longer than the 128"),
        (["en-es", "Hello", "--layer", "9"], "unknown layer '9'; expected 0 to 3, or one of: encoder.blocks.0"),
        (["en-es", "Hello", "--head", "8"], "unknown head 8; expected 0 to 7"),
        (["en-es", "Hello", "--head", "-1"], "unknown head -1; expected 0 to 7"),
        (["en-es", "Hello", "--html", "/"], "the page cannot be written to /"),
        (["shakespeare", ""], "has no tokens"),
        (["shakespeare", "x" * 300], "takes at most 256"),
        (["sort-dedup", ""], "pass letters separated by blanks"),
        (["digits-vit", "nowhere.png"], "image file nowhere.png does not exist"),
        (["spoken-digits", __file__], "spoken-digits has the type CTCEncoder, which has no walkthrough"),
        (["digits-conv", __file__], "and no attention; choose a Transformer"),
        (["en_es", "Hello"], "did you mean 'en-es'?"),
    ],
)
def test_invalid_input_is_a_one_line_error(cli, arguments, message):
    ran = cli("walk", *arguments)
    assert ran.code == 1
    assert ran.err.startswith("clearhead: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err
