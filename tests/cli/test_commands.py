"""Each command: what it prints for people, what for programs, and what for mistakes."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET

import pytest
import torch
import typer
from rich.text import Text

from clearhead import __version__
from clearhead.cli.app import _COMMANDS, app, every_command
from clearhead.cli.options import decoding_strategy
from clearhead.data import train_bpe
from clearhead.generation import BeamSearch, Greedy
from clearhead.models import storage
from clearhead.training import presets

NAMES = sorted({words[0] for words in every_command()} - {"demo"})


def test_version_and_help(cli):
    assert cli("--version").out == f"clearhead {__version__}\n"
    text = cli("--help").out
    for name in NAMES:
        assert name in text
    assert cli().code in (0, 2)  # help, not an error message


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(cli, name):
    ran = cli(name, "--help")
    assert ran.code == 0
    assert "Usage" in ran.out
    assert len(ran.out.splitlines()) > 8


def test_help_is_shown_as_it_is_written():
    """rich takes what stands in square brackets for markup, and leaves it out."""
    for name in _COMMANDS:
        importlib.import_module(f"clearhead.cli.{name}")
    waiting, texts = [typer.main.get_command(app)], []
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        texts += [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
    written = [text for text in texts if text]
    assert len(written) > 100
    assert [text for text in written if Text.from_markup(text).plain != text] == []


@pytest.mark.parametrize("default", [BeamSearch(5), Greedy()])
def test_a_length_penalty_counts_in_every_beam_search(default):
    assert decoding_strategy(None, 1.0, default) == default
    assert (
        decoding_strategy(None, 0.3, BeamSearch(5))
        == decoding_strategy(5, 0.3, default)
        == BeamSearch(5, length_penalty=0.3)
    )
    assert decoding_strategy(1, 0.3, default) == Greedy()


@pytest.mark.parametrize(
    "command",
    [
        ("mask", "causal()", "--svg"),
        ("claims", "show", "scale-key-weight", "--svg"),
        ("claims", "report"),
        ("plot", "schedule", "--out"),
        ("plot", "positions", "--out"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_in_one_line(cli, tmp_path, command):
    (tmp_path / "file.svg").touch()
    (tmp_path / "folder.svg").mkdir()
    places = [tmp_path / "folder.svg"]
    if command != ("claims", "report"):  # which takes long until it writes
        places.append(tmp_path / "file.svg" / "x.svg")
    for place in places:
        ran = cli(*command, place)
        assert ran.code == 1
        assert ran.err.startswith("clearhead: ")
        assert len(ran.err.splitlines()) == 1
        assert str(place) in ran.err
    if command[0] == "plot":
        ran = cli(*command, tmp_path / "x.txt")
        assert (ran.code, len(ran.err.splitlines())) == (1, 1)
        assert ".svg" in ran.err


def test_folders_of_drawings_are_made(cli, tmp_path):
    assert cli("mask", "causal()", "--svg", tmp_path / "a" / "m.svg").code == 0
    assert cli("plot", "schedule", "--out", tmp_path / "b" / "s.svg").code == 0
    ET.parse(tmp_path / "a" / "m.svg")
    ET.parse(tmp_path / "b" / "s.svg")


class TestMask:
    def test_draws_and_counts(self, cli):
        ran = cli("mask", "window(2, 2) | every(4)", "--n", 16)
        assert ran.code == 0
        assert "120 of 256 pairs, density 0.469, sparsity 53.1 %" in ran.out
        assert "15 ■ · · · ■ · · · ■ · · · ■ ■ ■ ■" in ran.out

    def test_json(self, cli):
        assert cli("mask", "window(2, 2) | every(4)", "--json").json == {
            "expression": "window(2, 2) | every(4)",
            "queries": 16,
            "keys": 16,
            "allowed": 120,
            "density": 0.46875,
            "sparsity": 0.53125,
        }

    def test_a_million_tokens(self, cli):
        ran = cli("mask", "causal() & (window(256, 0) | every(64))", "-n", 1_000_000, "--json")
        # By hand: the window has min(p + 1, 257) keys; every 64th of the older ones is added.
        n = 1_000_000
        window = sum(min(p + 1, 257) for p in range(257)) + (n - 257) * 257
        older = sum((p - 257) // 64 + 1 for p in range(257, n))
        assert ran.json["allowed"] == window + older

    def test_other_sizes_and_svg(self, cli, tmp_path):
        ran = cli("mask", "causal()", "-n", 3, "--keys", 7, "--offset", 4, "--svg", tmp_path / "m.svg", "--json")
        assert ran.json["allowed"] == 5 + 6 + 7
        ET.parse(tmp_path / "m.svg")

    def test_the_plan(self, cli):
        ran = cli("mask", "window(2, 2) | every(4)", "-n", 4096, "--plan")
        assert ran.code == 0
        assert "pairs allowed" in ran.out
        assert "blocks of 64 consecutive queries" in ran.out
        assert "as it is planned" in ran.out
        told = cli("mask", "window(2, 2) | every(4)", "-n", 4096, "--plan", "--device", "cuda", "--json").json["plan"]
        assert told["computed"] == told["dense"] + told["sparse"] >= told["density"] * 4096**2 * 0.999
        assert "NVIDIA H200" in told["words"]

    @pytest.mark.bad_input
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["window(2, 2 | every(4)"], "column 13"),
            (["winow(2, 2)"], "window"),
            (["causal()", "-n", "3", "--keys", "5"], "offset"),
            (["__import__('os')"], "column 1"),
        ],
    )
    def test_a_mistake_is_one_line(self, cli, arguments, words):
        ran = cli("mask", *arguments)
        assert ran.code == 1
        assert ran.out == ""
        assert ran.err.startswith("clearhead: ")
        assert ran.err.count("\n") == 1
        assert words in ran.err

    @pytest.mark.bad_input
    def test_wrong_usage_is_status_2(self, cli):
        assert cli("mask").code == 2
        assert cli("mask", "causal()", "-n", "-1").code == 2
        assert cli("nonsense").code == 2


class TestModels:
    def test_lists_what_is_in_the_box(self, cli):
        cards = cli("models", "--json").json
        assert set(cards) == {"digits-conv", "digits-vit", "en-es", "shakespeare", "sort-dedup", "spoken-digits"}
        assert all(card["parameters"] > 0 and card["command"].startswith("clearhead train") for card in cards.values())
        assert "en-es" in cli("models").out
        assert "license" in cli("models", "en-es").out

    def test_translate(self, cli, tmp_path):
        ran = cli("translate", "Hello world", "--attention")
        assert ran.code == 0
        assert ran.out.startswith("Hola")
        assert "world" in ran.out.splitlines()[2]
        (tmp_path / "in.txt").write_text("I love you.\n\nThank you.\n", encoding="utf-8")
        rows = cli("translate", "--file", tmp_path / "in.txt", "--beam", 1, "--json").json
        assert [row["source"] for row in rows] == ["I love you.", "", "Thank you."]
        assert rows[1]["target"] == ""
        assert rows[2]["target"] == "Gracias."

    def test_translate_has_a_line_for_each_line(self, cli, tmp_path):
        text = "\ufeffI love you.\r\nThank\u2028you.\r\n\x0cThank you.\x85\r\n"
        (tmp_path / "in.txt").write_text(text, encoding="utf-8", newline="")
        rows = cli("translate", "--file", tmp_path / "in.txt", "--beam", 1, "--json").json
        assert [row["source"] for row in rows] == ["I love you.", "Thank\u2028you.", "\x0cThank you.\x85"]
        (tmp_path / "empty.txt").write_text("", encoding="utf-8")
        assert cli("translate", "--file", tmp_path / "empty.txt", "--json").json == []

    def test_generate(self, cli):
        assert cli("generate", "D A A", "--model", "sort-dedup").out == "A D\n"
        first = cli("generate", "ROMEO:", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 3, "--json").json
        assert first["tokens"] == 20
        assert (
            first == cli("generate", "ROMEO:", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 3, "--json").json
        )

    def test_generate_shows_each_character_once_when_all_of_it_is_there(self, cli, tmp_path):
        """Characters of several bytes, of which a model that knows nothing makes whole ones and torn ones."""
        texts = ["日本語のテキスト、日本の言葉", "être naïve à Noël"]
        tokenizer = train_bpe(texts * 3, 300)
        tokenizer.save(tmp_path)
        recipe = presets.recipe("text").with_overrides({"model.vocab_size": tokenizer.vocab_size})
        torch.manual_seed(3)
        storage.save_checkpoint(recipe.model.build(), tmp_path)
        (tmp_path / "train.toml").write_text(recipe.to_toml(), encoding="utf-8")
        for seed in range(5):
            how = ["日本", "--model", tmp_path, "--max-new-tokens", 60, "--temperature", 1, "--seed", seed]
            assert cli("generate", *how).out == "日本" + cli("generate", *how, "--json").json["text"] + "\n"

    def test_generate_says_where_the_model_ends(self, cli):
        ran = cli("generate", "A" * 251, "--max-new-tokens", 9)
        assert ran.out.startswith("A" * 251)
        assert len(ran.out.rstrip("\n")) <= 256
        assert "shakespeare has a context window of 256 tokens" in ran.err
        slid = cli("generate", "A" * 251, "--max-new-tokens", 9, "--sliding-context", "--json").json
        assert slid["tokens"] == 9
        assert "at most" not in cli("generate", "A" * 251).err  # nobody asked for more

    def test_where_a_model_runs(self, cli):
        plain = cli("generate", "D A A", "--model", "sort-dedup").out
        for options in (("--device", "cpu"), ("--dtype", "float64"), ("--device", "auto", "--dtype", "bfloat16")):
            assert cli("generate", "D A A", "--model", "sort-dedup", *options).out == plain
        assert cli("evaluate", "sort-dedup", "--limit", 8, "--dtype", "float64", "--json").json["examples"] == 8
        assert cli("translate", "I love you.", "--dtype", "float64").out == cli("translate", "I love you.").out

    def test_evaluate(self, cli):
        result = cli("evaluate", "sort-dedup", "--limit", 64, "--json").json
        assert result["exact_match"] == 1.0
        assert result["examples"] == 64

    @pytest.mark.bad_input
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["translate"], "nothing to translate"),
            (["translate", "Hi", "--model", "sort-dedup"], "was trained for sort-dedup"),
            (["translate", "Hi", "--beam", "0"], "expected at least 1 (1 is greedy)"),
            (["translate", "word " * 300], "split it into sentences"),
            (["translate", "--file", "/nowhere.txt"], "cannot be read"),
            (["evaluate", "en_es"], "did you mean 'en-es'?"),
            (["evaluate", "en-es"], "--data"),
            (["evaluate", "digits-vit"], "takes images of 32×32, but the default data"),
            (["evaluate", "digits-conv"], "are 8×8: give the data that it was made for"),
            (["generate", "A" * 256], "the prompt has 256 tokens and the context of shakespeare is 256"),
            (["generate", "D A A", "--model", "en-es"], "this needs a model for text or sort-dedup"),
            (["generate", ""], "the prompt is empty; give a text"),
            (["translate", "Hi", "--beam", "2", "--length-penalty", "1000"], "usually 0 to 2"),
            (["translate", "Hi", "--dtype", "int8"], "expected one of float32"),
            (["translate", "Hi", "--device", "tpu"], "expected cpu or cuda"),
            (["models", "nope"], "there is no model"),
            (["data", "nope"], "nope"),
        ],
    )
    def test_a_mistake_is_one_line(self, cli, arguments, words):
        ran = cli(*arguments)
        assert ran.code == 1
        assert words in ran.err
        assert ran.err.count("\n") == 1

    def test_a_model_without_a_card_says_how_to_measure_it(self, cli, tmp_path):
        (tmp_path / "config.toml").touch()
        ran = cli("models", tmp_path)
        assert ran.code == 1
        assert ran.err == f"clearhead: {tmp_path} has no card; measure the model with: clearhead evaluate {tmp_path}\n"

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            (["train", "digits"], "cannot train in book.txt/folder: Not a directory; choose another folder"),
            (["train-tokenizer", "book.txt"], "cannot write book.txt/folder/tokenizer.json: Not a directory; "),
            (["data", "shakespeare"], "[Errno 20] Not a directory: 'book.txt/folder'"),
        ],
    )
    def test_a_folder_that_cannot_be_made_is_one_line(self, cli, tmp_path, monkeypatch, command, words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "book.txt").write_text("some text\n" * 7)
        ran = cli(*command, "--out", "book.txt/folder")
        assert ran.code == 1
        assert ran.err.splitlines()[-1].startswith(f"clearhead: {words}")
        assert "Traceback" not in ran.err


class TestTrain:
    @pytest.mark.parametrize("name", ["a[b]c", "a[/b]c", "a:cat:c"])
    def test_a_folder_of_any_name_is_shown_as_it_is(self, cli, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        settings = ["steps=2", "warmup_steps=1", "d_model=8", "n_heads=2", "batch.budget=256", "n_train=64"]
        sets = [part for item in settings for part in ("--set", item)]
        ran = cli("train", "sort-dedup", "--out", name, *sets, "--set", "n_validation=16")
        assert ran.code == 0
        assert [line.split() for line in ran.out.splitlines() if line.startswith("folder")] == [["folder", name]]
        assert f"finished: the model is in {name}/model" in ran.out

    def test_from_the_command_line_to_a_model_that_answers(self, cli, tmp_path):
        out = tmp_path / "run"
        settings = ["steps=12", "warmup_steps=2", "d_model=16", "n_heads=2", "batch.budget=256", "n_train=64"]
        sets = [part for item in settings for part in ("--set", item)]
        ran = cli("train", "sort-dedup", "--out", out, *sets, "--set", "n_validation=16")
        assert ran.code == 0
        assert "finished" in ran.out
        assert (out / "loss.png").stat().st_size > 1000
        assert cli("evaluate", out, "--json").json["examples"] == 16
        assert cli("plot", "run", out, "--out", tmp_path / "again.png").code == 0
        assert (tmp_path / "again.png").exists()

    def test_lists_presets(self, cli):
        names = {row["preset"] for row in cli("train", "--list", "--json").json}
        assert {
            "small",
            "en-es",
            "digits-vit",
            "digits-conv",
            "shakespeare",
            "gpt2",
            "sort-dedup",
            "spoken-digits",
        } == names

    @pytest.mark.bad_input
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["train"], "task is missing"),
            (["train", "translaton"], "did you mean 'translation'?"),
            (["train", "translation"], "clearhead data"),
            (["train", "digits", "--preset", "digits-vti"], "did you mean 'digits-vit'?"),
            (["train", "digits", "--set", "lr_mx=1"], "did you mean 'lr_max'?"),
            (["train", "--resume", "nowhere"], "no train.toml"),
        ],
    )
    def test_a_mistake_is_one_line(self, cli, tmp_path, monkeypatch, arguments, words):
        monkeypatch.chdir(tmp_path)
        ran = cli(*arguments)
        assert ran.code == 1
        assert words in ran.err
        assert ran.err.strip().count("\n") == 0

    @pytest.mark.bad_input
    def test_a_setting_without_a_value_is_wrong_usage(self, cli):
        assert cli("train", "digits", "--set", "steps").code == 2


class TestData:
    def test_lists_licences_and_sources(self, cli):
        rows = cli("data", "--json").json
        assert {"name", "about", "license", "bytes", "checked by", "from"} == set(rows[0])
        assert "svhn" in cli("data").out

    def test_trains_a_tokenizer(self, cli, tmp_path):
        (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 50, encoding="utf-8")
        ran = cli("train-tokenizer", tmp_path / "t.txt", "--out", tmp_path / "tok", "--vocab-size", 270, "--json")
        assert ran.json["vocab_size"] <= 270
        assert (tmp_path / "tok" / "tokenizer.json").is_file()


class TestPlot:
    @pytest.mark.parametrize("name", ["schedule", "positions"])
    @pytest.mark.parametrize("ending", [".png", ".svg"])
    def test_draws_a_file(self, cli, tmp_path, name, ending):
        path = tmp_path / f"figure{ending}"
        assert cli("plot", name, "-o", path).code == 0
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if ending == ".png" else b"<?xml" in start


def test_demo(cli):
    ran = cli("demo", "I love you.")
    assert ran.code == 0
    assert "120 of 256 pairs" in ran.out
    assert "Hola" in ran.out
    assert "Te quiero." in ran.out or "Te amo." in ran.out
