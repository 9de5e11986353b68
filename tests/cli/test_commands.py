"""Each command: output for people, JSON for programs, and messages for invalid input."""

from __future__ import annotations

import importlib
import json
import signal
import xml.etree.ElementTree as ET

import pytest
import torch
import typer
from rich.text import Text

from clearhead import __version__
from clearhead.cli import main
from clearhead.cli.app import _COMMANDS, app, every_command
from clearhead.cli.options import decoding_strategy
from clearhead.data import train_bpe
from clearhead.generation import BeamSearch, Greedy
from clearhead.hub.translate import DEFAULT_STRATEGY
from clearhead.models import storage
from clearhead.training import presets

NAMES = sorted({words[0] for words in every_command()} - {"demo"})


def test_app_prints_version_and_help(cli):
    assert cli("--version").out == f"clearhead {__version__}\n"
    text = cli("--help").out
    for name in NAMES:
        assert name in text
    assert cli().code in (0, 2)  # help, not an error message


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(cli, name):
    ran = cli(name, "--help")
    assert ran.code == 0
    assert "Usage" in ran.out
    assert len(ran.out.splitlines()) > 8


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
def test_usage_has_one_pair_of_brackets_per_argument(cli, words):
    (usage,) = [line for line in cli(*words, "--help").out.splitlines() if "Usage:" in line]
    assert "[[" not in usage
    assert "...}" not in usage


def test_help_contains_no_rich_markup():
    """rich would interpret text in square brackets as markup and drop it."""
    for name in _COMMANDS:
        importlib.import_module(f"clearhead.cli.{name}")
    pending, texts = [typer.main.get_command(app)], []
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        texts += [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
    texts = [text for text in texts if text]
    assert len(texts) > 100
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


@pytest.mark.parametrize("default", [DEFAULT_STRATEGY, Greedy()])
def test_decoding_strategy_applies_the_length_penalty_to_beam_search(default):
    assert decoding_strategy(None, 1.0, default) == default
    assert (
        decoding_strategy(None, 0.3, DEFAULT_STRATEGY)
        == decoding_strategy(5, 0.3, default)
        == BeamSearch(5, length_penalty=0.3, early_stopping=True)
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
def test_unwritable_output_file_is_a_one_line_error(cli, tmp_path, command):
    (tmp_path / "file.svg").touch()
    (tmp_path / "folder.svg").mkdir()
    paths = [tmp_path / "folder.svg"]
    if command != ("claims", "report"):  # slow until it writes
        paths.append(tmp_path / "file.svg" / "x.svg")
    for path in paths:
        ran = cli(*command, path)
        assert ran.code == 1
        assert ran.err.startswith("clearhead: ")
        assert len(ran.err.splitlines()) == 1
        assert str(path) in ran.err
    if command[0] == "plot":
        ran = cli(*command, tmp_path / "x.txt")
        assert (ran.code, len(ran.err.splitlines())) == (1, 1)
        assert ".svg" in ran.err


def test_drawing_commands_create_missing_folders(cli, tmp_path):
    assert cli("mask", "causal()", "--svg", tmp_path / "a" / "m.svg").code == 0
    assert cli("plot", "schedule", "--out", tmp_path / "b" / "s.svg").code == 0
    ET.parse(tmp_path / "a" / "m.svg")
    ET.parse(tmp_path / "b" / "s.svg")


class TestMask:
    def test_mask_draws_and_counts(self, cli):
        ran = cli("mask", "window(2, 2) | every(4)", "--n", 16)
        assert ran.code == 0
        assert "120 of 256 pairs, density 0.469, sparsity 53.1 %" in ran.out
        assert "15 ■ · · · ■ · · · ■ · · · ■ ■ ■ ■" in ran.out

    def test_mask_json_contains_counts(self, cli):
        assert cli("mask", "window(2, 2) | every(4)", "--json").json == {
            "expression": "window(2, 2) | every(4)",
            "queries": 16,
            "keys": 16,
            "pairs": 256,
            "allowed": 120,
            "density": 0.46875,
            "sparsity": 0.53125,
        }

    def test_mask_per_head_counts_the_pairs_of_all_heads(self, cli):
        arguments = ("mask", "per_head(causal(), window(1, 0), repeat=2)", "-n", 6)
        allowed = 2 * (6 * 7 // 2 + 2 * 6 - 1)  # heads 0 and 1 are causal, 2 and 3 see two keys each
        assert f"{allowed} of {4 * 36} pairs, density {allowed / 144:.3g}, sparsity" in cli(*arguments).out
        document = cli(*arguments, "--json").json
        assert (document["pairs"], document["allowed"]) == (144, allowed)
        assert document["density"] == allowed / 144

    @pytest.mark.parametrize("option", [("--plan",), ("--position", 3), ("--device", "cpu")])
    def test_mask_options_of_masks_reject_a_bias(self, cli, option):
        ran = cli("mask", "alibi(8)", *option)
        assert ran.code == 1
        assert ran.err == "clearhead: alibi(8) is a bias; --plan, --device and --position are for masks\n"

    @pytest.mark.parametrize("expression", ["causal()", "alibi(2)"])
    def test_mask_svg_with_another_ending_is_an_error(self, cli, tmp_path, expression):
        ran = cli("mask", expression, "--svg", tmp_path / "mask.png")
        assert ran.code == 1
        assert ran.err == "clearhead: cannot write mask.png: unknown file type; end it in .svg\n"
        assert not (tmp_path / "mask.png").exists()

    def test_mask_counts_a_million_tokens(self, cli):
        ran = cli("mask", "causal() & (window(256, 0) | every(64))", "-n", 1_000_000, "--json")
        # By hand: the window has min(p + 1, 257) keys; every 64th of the older ones is added.
        n = 1_000_000
        window = sum(min(p + 1, 257) for p in range(257)) + (n - 257) * 257
        older = sum((p - 257) // 64 + 1 for p in range(257, n))
        assert ran.json["allowed"] == window + older

    def test_mask_with_keys_and_offset_writes_svg(self, cli, tmp_path):
        ran = cli("mask", "causal()", "-n", 3, "--keys", 7, "--offset", 4, "--svg", tmp_path / "m.svg", "--json")
        assert ran.json["allowed"] == 5 + 6 + 7
        ET.parse(tmp_path / "m.svg")

    def test_bias_is_drawn_and_counted(self, cli, tmp_path):
        ran = cli("mask", "alibi(2) + distance(gaussian(4.0))", "-n", 12)
        assert ran.code == 0
        assert " 0 ██▓▓" in ran.out
        assert "48 values by distance for 2 heads, 288 as a tensor" in ran.out
        document = cli("mask", "alibi(8)", "-n", 3, "--keys", 7, "--svg", tmp_path / "b.svg", "--json").json
        assert document == {"expression": "alibi(8)", "queries": 3, "keys": 7, "heads": 8, "values": 80}
        ET.parse(tmp_path / "b.svg")

    def test_mask_prints_and_returns_the_plan(self, cli):
        ran = cli("mask", "window(2, 2) | every(4)", "-n", 4096, "--plan")
        assert ran.code == 0
        assert "pairs allowed" in ran.out
        assert "blocks of 64 consecutive queries" in ran.out
        assert "as it is planned" in ran.out
        plan = cli("mask", "window(2, 2) | every(4)", "-n", 4096, "--plan", "--device", "cuda", "--json").json["plan"]
        assert plan["computed"] == plan["dense"] + plan["sparse"] >= plan["density"] * 4096**2 * 0.999
        assert "NVIDIA H200" in plan["explanation"]

    @pytest.mark.bad_input
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["window(2, 2 | every(4)"], "column 13"),
            (["winow(2, 2)"], "window"),
            (["causal()", "-n", "3", "--keys", "5"], "offset"),
            (["__import__('os')"], "column 1"),
            (["alibi(2) + relative(table)"], "table"),
            (["distance(cubic(3))"], "cubic"),
        ],
    )
    def test_invalid_input_is_a_one_line_error(self, cli, arguments, message):
        ran = cli("mask", *arguments)
        assert ran.code == 1
        assert ran.out == ""
        assert ran.err.startswith("clearhead: ")
        assert ran.err.count("\n") == 1
        assert message in ran.err

    @pytest.mark.bad_input
    def test_usage_errors_exit_with_status_2(self, cli):
        assert cli("mask").code == 2
        assert cli("mask", "causal()", "-n", "-1").code == 2
        assert cli("nonsense").code == 2


class TestModels:
    def test_models_lists_bundled_models(self, cli):
        cards = cli("models", "--json").json
        assert set(cards) == {"digits-conv", "digits-vit", "en-es", "shakespeare", "sort-dedup", "spoken-digits"}
        assert all(card["parameters"] > 0 and card["command"].startswith("clearhead train") for card in cards.values())
        assert "en-es" in cli("models").out
        assert "license" in cli("models", "en-es").out

    def test_translate_prints_text_attention_and_json(self, cli, tmp_path):
        ran = cli("translate", "Hello world", "--attention")
        assert ran.code == 0
        assert ran.out.startswith("Hola")
        assert "world" in ran.out.splitlines()[2]
        (tmp_path / "in.txt").write_text("I love you.\n\nThank you.\n", encoding="utf-8")
        rows = cli("translate", "--file", tmp_path / "in.txt", "--beam", 1, "--json").json
        assert [row["source"] for row in rows] == ["I love you.", "", "Thank you."]
        assert rows[1]["target"] == ""
        assert rows[2]["target"] == "Gracias."

    def test_translate_file_returns_one_row_per_line(self, cli, tmp_path):
        text = "\ufeffI love you.\r\nThank\u2028you.\r\n\x0cThank you.\x85\r\n"
        (tmp_path / "in.txt").write_text(text, encoding="utf-8", newline="")
        rows = cli("translate", "--file", tmp_path / "in.txt", "--beam", 1, "--json").json
        assert [row["source"] for row in rows] == ["I love you.", "Thank\u2028you.", "\x0cThank you.\x85"]
        (tmp_path / "empty.txt").write_text("", encoding="utf-8")
        assert cli("translate", "--file", tmp_path / "empty.txt", "--json").json == []

    def test_generate_is_reproducible_with_a_seed(self, cli):
        assert cli("generate", "D A A", "--model", "sort-dedup").out == "A D\n"
        first = cli("generate", "ROMEO:", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 3, "--json").json
        assert first["tokens"] == 20
        assert (
            first == cli("generate", "ROMEO:", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 3, "--json").json
        )

    def test_generate_streams_only_complete_characters(self, cli, tmp_path):
        """An untrained model generates complete and incomplete multi-byte characters."""
        texts = ["日本語のテキスト、日本の言葉", "être naïve à Noël"]
        tokenizer = train_bpe(texts * 3, 300)
        tokenizer.save(tmp_path)
        recipe = presets.recipe("text").with_overrides({"model.vocab_size": tokenizer.vocab_size})
        torch.manual_seed(3)
        storage.save_checkpoint(recipe.model.build(), tmp_path)
        (tmp_path / "train.toml").write_text(recipe.to_toml(), encoding="utf-8")
        for seed in range(5):
            arguments = ["日本", "--model", tmp_path, "--max-new-tokens", 60, "--temperature", 1, "--seed", seed]
            assert cli("generate", *arguments).out == "日本" + cli("generate", *arguments, "--json").json["text"] + "\n"

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_interrupted_generate_prints_the_text_so_far(self, cli, monkeypatch, options):
        from clearhead.hub import text_generation

        def interrupted(*arguments, **settings):
            yield "th"
            yield "ou"
            raise KeyboardInterrupt

        monkeypatch.setattr(text_generation, "stream_text", interrupted)
        ran = cli("generate", "Wilt ", *options)
        assert ran.code == 130
        assert ran.err == ""
        if options:
            assert json.loads(ran.out)["text"] == "thou"
            assert not json.loads(ran.out)["finished"]
        else:
            assert ran.out == "Wilt thou\n"

    def test_generate_rejects_temperature_zero(self, cli):
        ran = cli("generate", "x", "--temperature", "0")
        assert ran.code == 1
        assert ran.err == "clearhead: --temperature is 0; expected a number above 0, or --greedy, which is the limit\n"

    def test_generate_reports_the_end_of_the_context_window(self, cli):
        ran = cli("generate", "A" * 251, "--max-new-tokens", 9)
        assert ran.out.startswith("A" * 251)
        assert len(ran.out.rstrip("\n")) <= 256
        assert "shakespeare has a context window of 256 tokens" in ran.err
        sliding = cli("generate", "A" * 251, "--max-new-tokens", 9, "--sliding-context", "--json").json
        assert sliding["tokens"] == 9
        assert "shakespeare has a context window of 256 tokens" in cli("generate", "A" * 251).err

    def test_generate_reports_the_default_limit_on_new_tokens(self, cli):
        ran = cli("generate", "ROMEO:", "--sliding-context")
        assert ran.err == "(stopped after 128 tokens; --max-new-tokens sets the limit)\n"
        assert cli("generate", "ROMEO:", "--max-new-tokens", 5).err == ""

    def test_device_and_dtype_options_keep_the_result(self, cli):
        expected = cli("generate", "D A A", "--model", "sort-dedup").out
        for options in (("--device", "cpu"), ("--dtype", "float64"), ("--device", "auto", "--dtype", "bfloat16")):
            assert cli("generate", "D A A", "--model", "sort-dedup", *options).out == expected
        assert cli("evaluate", "sort-dedup", "--limit", 8, "--dtype", "float64", "--json").json["examples"] == 8
        assert cli("translate", "I love you.", "--dtype", "float64").out == cli("translate", "I love you.").out

    def test_evaluate_prints_no_empty_lines(self, cli):
        lines = cli("evaluate", "sort-dedup", "--limit", "5").out.splitlines()
        assert lines[0].split() == ["model", "sort-dedup"]
        assert all(lines)

    def test_evaluate_returns_metrics(self, cli):
        result = cli("evaluate", "sort-dedup", "--limit", 64, "--json").json
        assert result["exact_match"] == 1.0
        assert result["examples"] == 64

    @pytest.mark.bad_input
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["translate"], "nothing to translate"),
            (["translate", "Hi", "--model", "sort-dedup"], "was trained for sort-dedup"),
            (["translate", "Hi", "--beam", "0"], "--beam is 0; expected 1 to 1000 (1 is greedy)"),
            (["translate", "Hi", "--beam", "1000000"], "--beam is 1000000; expected 1 to 1000 (1 is greedy)"),
            (["translate", "--file", "/"], "/ cannot be read: Is a directory; give a text file in UTF-8"),
            (["translate", "word " * 300], "split it into sentences"),
            (["translate", "--file", "/nowhere.txt"], "cannot be read"),
            (["evaluate", "en_es"], "did you mean 'en-es'?"),
            (["evaluate", "en-es"], "--data"),
            (["evaluate", "digits-vit"], "takes images of 32×32, but the default data"),
            (["evaluate", "digits-conv"], "the default data has 8×8"),
            (["generate", "A" * 256], "the prompt has 256 tokens and the context of shakespeare is 256"),
            (["generate", "D A A", "--model", "en-es"], "this needs a model for text or sort-dedup"),
            (["generate", ""], "the prompt is empty; give a text"),
            (["translate", "Hi", "--beam", "2", "--length-penalty", "1000"], "usually 0 to 2"),
            (["translate", "Hi", "--dtype", "int8"], "expected one of float32"),
            (["translate", "Hi", "--device", "tpu"], "expected cpu or cuda"),
            (["models", "nope"], "is not a bundled model"),
            (["data", "nope"], "nope"),
        ],
    )
    def test_invalid_input_is_a_one_line_error(self, cli, arguments, message):
        ran = cli(*arguments)
        assert ran.code == 1
        assert message in ran.err
        assert ran.err.count("\n") == 1

    def test_models_without_a_card_names_the_evaluate_command(self, cli, tmp_path):
        (tmp_path / "config.toml").touch()
        ran = cli("models", tmp_path)
        assert ran.code == 1
        assert ran.err == f"clearhead: {tmp_path} has no card; measure the model with: clearhead evaluate {tmp_path}\n"

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            (["train", "digits"], "cannot train in book.txt/folder: Not a directory; choose another folder"),
            (["train-tokenizer", "book.txt"], "cannot write book.txt/folder/tokenizer.json: Not a directory; "),
            (["data", "shakespeare"], "[Errno 20] Not a directory: 'book.txt/folder'"),
        ],
    )
    def test_unwritable_output_folder_is_a_one_line_error(self, cli, tmp_path, monkeypatch, command, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "book.txt").write_text("some text\n" * 7)
        ran = cli(*command, "--out", "book.txt/folder")
        assert ran.code == 1
        assert ran.err.splitlines()[-1].startswith(f"clearhead: {message}")
        assert "Traceback" not in ran.err


class TestTrain:
    @pytest.mark.parametrize("name", ["a[b]c", "a[/b]c", "a:cat:c"])
    def test_train_prints_folder_names_with_brackets_and_colons(self, cli, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        settings = ["steps=2", "warmup_steps=1", "d_model=8", "n_heads=2", "batch.budget=256", "n_train=64"]
        sets = [part for item in settings for part in ("--set", item)]
        ran = cli("train", "sort-dedup", "--out", name, *sets, "--set", "n_validation=16")
        assert ran.code == 0
        assert [line.split() for line in ran.out.splitlines() if line.startswith("folder")] == [["folder", name]]
        assert f"finished: the model is in {name}/model" in ran.out

    def test_train_writes_a_model_that_evaluate_and_plot_read(self, cli, tmp_path):
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

    def test_train_second_ctrl_c_prints_how_to_resume(self, cli, tmp_path, monkeypatch):
        from clearhead.training import ProgressBar

        def interrupt(self, step):
            for _ in range(2 if step == 3 else 0):
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(ProgressBar, "on_step_end", interrupt)
        out = tmp_path / "run"
        settings = ["steps=4", "warmup_steps=1", "d_model=8", "n_heads=2", "n_train=64", "checkpoint_every=2"]
        ran = cli("train", "sort-dedup", "--out", out, *[part for item in settings for part in ("--set", item)])
        assert ran.code == 130
        assert ran.err.splitlines()[-1] == (
            f"clearhead: stopped without saving: the last checkpoint is {out / 'step-00000002'}. "
            f"Resume with: clearhead train --resume {out}"
        )
        monkeypatch.undo()
        assert cli("train", "--resume", out).code == 0

    def test_train_list_returns_all_presets(self, cli):
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
        ("arguments", "message"),
        [
            (["train"], "task is missing"),
            (["train", "translaton"], "did you mean 'translation'?"),
            (["train", "translation"], "clearhead data"),
            (["train", "digits", "--preset", "digits-vti"], "did you mean 'digits-vit'?"),
            (["train", "digits", "--set", "lr_mx=1"], "did you mean 'lr_max'?"),
            (["train", "--resume", "nowhere"], "no train.toml"),
        ],
    )
    def test_invalid_input_is_a_one_line_error(self, cli, tmp_path, monkeypatch, arguments, message):
        monkeypatch.chdir(tmp_path)
        ran = cli(*arguments)
        assert ran.code == 1
        assert message in ran.err
        assert ran.err.strip().count("\n") == 0

    @pytest.mark.bad_input
    def test_setting_without_a_value_exits_with_status_2(self, cli):
        assert cli("train", "digits", "--set", "steps").code == 2


class TestData:
    def test_data_lists_licenses_and_origins(self, cli):
        rows = cli("data", "--json").json
        assert {"name", "description", "license", "bytes", "verification", "origin"} == set(rows[0])
        assert "svhn" in cli("data").out

    def test_train_tokenizer_writes_tokenizer_json(self, cli, tmp_path):
        (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 50, encoding="utf-8")
        ran = cli("train-tokenizer", tmp_path / "t.txt", "--out", tmp_path / "tok", "--vocab-size", 270, "--json")
        assert ran.json["vocab_size"] <= 270
        assert (tmp_path / "tok" / "tokenizer.json").is_file()


class TestPlot:
    @pytest.mark.parametrize("name", ["schedule", "positions"])
    @pytest.mark.parametrize("ending", [".png", ".svg"])
    def test_plot_writes_png_and_svg(self, cli, tmp_path, name, ending):
        path = tmp_path / f"figure{ending}"
        assert cli("plot", name, "-o", path).code == 0
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if ending == ".png" else b"<?xml" in start


def test_interruption_while_commands_are_imported_exits_with_status_130(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_demo_draws_a_mask_and_translates(cli):
    ran = cli("demo", "I love you.")
    assert ran.code == 0
    assert "120 of 256 pairs" in ran.out
    assert "Hola" in ran.out
    assert "Te quiero." in ran.out or "Te amo." in ran.out


def test_explore_rejects_a_timeout_of_nan(cli):
    ran = cli("explore", "sort-dedup", "--timeout", "nan", "--no-open")
    assert ran.code == 2
    assert "Invalid value" in ran.err
