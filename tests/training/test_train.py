"""The `train` function: tasks, folders, errors, progress, plots, and starting from trained parameters."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from clearhead.data.image_transforms import DatasetNormalize
from clearhead.data.tokenizers import base
from clearhead.errors import ConfigError, DataError, StorageError
from clearhead.models import storage
from clearhead.nn.positions import LearnedPositions
from clearhead.training import Progress, ProgressBar, Recipe, WarmupCosine, draw_run, draw_schedule, read_log, train
from clearhead.training.launch import data_hash
from clearhead.training.objective import scores
from tests.training.tiny import SETTINGS, At

PNG = b"\x89PNG\r\n\x1a\n"
FEW = {"steps": 7, "warmup_steps": 2, "eval_every": 5, "checkpoint_every": 4, "device": "cpu"}
TEXT = "".join(f"{n} men went to mow, went to mow a meadow, {'one ' * (n % 3)}\n" for n in range(61))


def pairs(n, start=0):
    return "".join(f"{'to ' * (k % 4)}{k}\t{k}{' a' * (k % 5)}\n" for k in range(start, start + n))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/train.tsv").write_text(pairs(101) + "no tab here\n")
    (tmp_path / "pairs/dev.tsv").write_text(pairs(13, start=500))
    (tmp_path / "text.txt").write_text(TEXT)
    return {
        "translation": tmp_path / "pairs",
        "text": tmp_path / "text.txt",
        "digits": None,
        "sort-dedup": None,
    }


SMALL = {
    "translation": {"data.vocab_size": 300, "d_model": 12, "n_heads": 3, "d_ff": 13, "batch.budget": 211},
    "text": {"d_model": 12, "n_heads": 3, "context": 17, "batch.examples": 5},
    "digits": {"d_model": 12, "n_heads": 3, "d_ff": 13},
    "sort-dedup": {
        name: SETTINGS[name] for name in ("n_symbols", "max_length", "n_train", "n_validation", "d_model", "n_heads")
    },
}


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("task", list(SMALL))
def test_train_every_task_exports_a_model_with_the_reported_loss(tmp_path, data, task):
    infos = []

    class Watch(Progress):
        def on_train_begin(self, info):
            infos.append(info)

    summary = train(task, data=data[task], out=tmp_path / "run", overrides=FEW | SMALL[task], progress=Watch())
    assert (summary.ending, summary.steps, summary.task, summary.preset) == ("finished", 7, task, "small")
    assert [row["step"] for row in read_log(tmp_path / "run") if row["kind"] == "valid"] == [5, 7]
    assert (tmp_path / "run/loss.png").read_bytes().startswith(PNG)

    model = storage.load_checkpoint(summary.model)
    recipe = Recipe.load(summary.model)
    assert str(tmp_path) not in (tmp_path / "run/model/train.toml").read_text()
    tokenizer = None
    if task != "digits":
        tokenizer = base.load_tokenizer(summary.model)
        assert model.config.vocab_size == tokenizer.vocab_size
    loaded = recipe.data.with_path(data[task]).load(seed=0, tokenizer=tokenizer)
    total = torch.zeros(2, dtype=torch.float64)
    labels = 0
    with torch.no_grad():
        for row in range(len(loaded.validation)):  # one by one: no batch, no padding
            batch = loaded.validation.batch(torch.tensor([row]))
            total += scores(model, batch)
            labels += batch.n_labels
    assert summary.valid_loss == pytest.approx(total[0].item() / labels, rel=1e-5)
    assert summary.valid_accuracy == pytest.approx(total[1].item() / labels, abs=1e-6)
    (info,) = infos
    assert info.n_parameters == summary.n_parameters == sum(p.numel() for p in model.parameters())
    if task == "translation":
        assert re.search(r"train.tsv: 101 of 102 rows are good; skipped: no tab 1 \(line 102\)", " ".join(info.notes))


def test_train_digits_exports_the_measured_normalization(tmp_path):
    summary = train("digits", out=tmp_path / "run", overrides=FEW | SMALL["digits"])
    normalize = Recipe.load(summary.model).data.normalize
    assert isinstance(normalize, DatasetNormalize)
    pixels = Recipe.load(summary.model).data.load().train.pixels.double() / 255
    assert (normalize.mean, normalize.std) == pytest.approx((pixels.mean().item(), pixels.std(correction=0).item()))


def test_train_lowers_the_loss(tmp_path):
    """Two hundred steps of a small decoder sort unseen rows of a five-letter alphabet without a fault; two steps
    do not."""
    few = train("sort-dedup", out=tmp_path / "few", overrides=SETTINGS | {"steps": 2})
    settings = SETTINGS | {"steps": 200, "d_model": 36, "n_train": 4001}
    many = train("sort-dedup", out=tmp_path / "many", overrides=settings)
    assert few.valid_loss > 1.5  # of ln 8 = 2.08 for no idea at all
    assert many.valid_loss < 0.1
    assert many.valid_accuracy > 0.99


@pytest.mark.parametrize("task", ["translation", "sort-dedup"])
def test_train_learned_positions_cover_padding_and_later_epochs(tmp_path, data, task):
    """Widths are rounded up to multiples of 8, and another epoch's letters may be longer than those of the first."""
    few = {"n_train": 5, "n_validation": 2, "max_length": 29} if task == "sort-dedup" else {"max_tokens": 7}
    settings = {
        **FEW,
        **SMALL[task],
        **few,
        "batch": {"type": "TokenBudget", "budget": 300, "multiple": 8},
        "max_len": 3,
        "positions": LearnedPositions(max_len=3),
        "steps": 29,
    }
    assert train(task, data=data[task], out=tmp_path / "run", overrides=settings).ending == "finished"


@pytest.mark.bad_input  # a stand-in for a task
def testdata_hash_of_many_examples_stays_in_range():
    class Many:
        def __len__(self):
            return 2**24 + 4

        def lengths(self):
            return torch.ones(1, 1, dtype=torch.int64)

        def labels_of(self, rows):
            assert int(rows.max()) == len(self) - 1
            return rows

    assert data_hash(SimpleNamespace(train=Many(), validation=Many()))


def test_train_resume_with_moved_data(tmp_path, data):
    train("text", data=data["text"], out=tmp_path / "run", overrides=FEW | SMALL["text"])
    data["text"].rename(tmp_path / "elsewhere.txt")
    with pytest.raises(StorageError, match=r"file .* does not exist"):
        train(resume=tmp_path / "run")
    assert train(resume=tmp_path / "run", data=tmp_path / "elsewhere.txt").ending == "finished"


def test_train_under_no_grad_of_the_caller(tmp_path):
    with torch.no_grad():
        no_grad_summary = train("sort-dedup", out=tmp_path / "inside", overrides=SETTINGS)
    summary = train("sort-dedup", out=tmp_path / "outside", overrides=SETTINGS)
    assert no_grad_summary.best_loss == summary.best_loss
    with torch.inference_mode(), pytest.raises(ConfigError, match="call it outside"):
        train("sort-dedup", out=tmp_path / "never", overrides=SETTINGS)
    assert not (tmp_path / "never").exists()


def test_train_uses_the_first_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train("sort-dedup", overrides=SETTINGS | {"steps": 2}).folder == "runs/sort-dedup"
    assert train("sort-dedup", overrides=SETTINGS | {"steps": 2}).folder == "runs/sort-dedup-2"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train("sort-dedup", out=folder, overrides=SETTINGS | {"steps": 2})
    return folder


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("sort-dedup", {"out": "", "overrides": SETTINGS}, r"already contains a run; resume it \(resume="),
        (None, {"resume": "", "overrides": {"lr_max": 1.0}}, "'lr_max' cannot change when a run is resumed"),
        ("text", {"resume": ""}, "remove task, preset, out, init and tokenizer"),
        (None, {"resume": "model"}, "contains a trained model instead of a run; resume its run"),
    ],
    ids=["same folder", "other rate", "task", "model"],
)
def test_train_in_the_folder_of_a_run_with_wrong_arguments_raises(finished_run, task, options, message):
    paths = {name: finished_run / options[name] for name in ("out", "resume") if name in options}
    with pytest.raises(ConfigError, match=message):
        train(task, **options | paths)


def test_train_into_a_folder_with_files_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        train("sort-dedup", out=tmp_path, overrides=SETTINGS)


def test_train_without_task_raises():
    with pytest.raises(ConfigError, match="task is missing"):
        train()


def test_train_without_data_raises_and_leaves_no_folder(tmp_path):
    with pytest.raises(DataError, match="the task text needs data"):
        train("text", out=tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_resume_of_a_folder_without_recipe_raises(tmp_path):
    with pytest.raises(StorageError, match=r"has no train\.toml"):
        train(resume=tmp_path)


def test_resume_with_an_unreadable_recipe_raises(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run/train.toml").write_bytes(b"\xff\xfepreset")
    with pytest.raises(StorageError, match=r"train\.toml: .* can't decode"):
        train(resume=tmp_path / "run")


@pytest.mark.parametrize(
    "wrong", [{"batch.budget": 1}, {"batch": {"type": "SequencePacking", "rows": 2, "width": 64}}, {"epochs": 1}]
)
def test_train_failed_start_leaves_no_files(tmp_path, wrong):
    settings = SETTINGS | {"warmup_steps": 10**6} if "epochs" in wrong else SETTINGS
    if "epochs" in wrong:
        del settings["steps"]
    with pytest.raises((ConfigError, DataError)):
        train("sort-dedup", out=tmp_path / "run", overrides={**settings, **wrong})
    assert not (tmp_path / "run").exists()
    assert train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS).ending == "finished"


def test_progress_bar_shows_the_metrics(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    with ProgressBar(Console(file=out, force_terminal=True, width=150)) as bar:
        summary = train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS, progress=bar)
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert f"sort-dedup (small): {summary.n_parameters:,} parameters, 97 examples, 11 steps on cpu" in output
    last = [row for row in read_log(tmp_path / "run") if row["kind"] == "train"][-1]
    assert f"loss {last['loss']:.3f}  lr {last['lr']:.2e}  |g| {last['grad_norm']:.2f}" in output
    assert "11/11" in output
    assert f"valid {summary.valid_loss:.3f}" in output


def test_progress_bar_fits_eighty_columns(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    with ProgressBar(Console(file=out, force_terminal=True, width=80)) as bar:
        summary = train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS, progress=bar)
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    last = [line for line in output.splitlines() if "tok/s" in line][-1]
    assert "…" not in last
    assert "11/11" in last
    assert f"valid {summary.valid_loss:.3f}" in last
    assert re.search(r"\d:\d\d:\d\d", last)


def test_summary_table_is_readable(tmp_path):
    table = train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS).table()
    assert table["run"] == "sort-dedup (small), finished"
    assert table["steps"].startswith("11 of 11 (")
    assert table["model"] == str(tmp_path / "run/model")


def test_summary_table_without_validation_names_no_best_step(tmp_path):
    first_signal = At(2, lambda: os.kill(os.getpid(), signal.SIGINT))  # before the first validation
    summary = train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS, progress=first_signal)
    assert (summary.ending, summary.best_loss) == ("interrupted", None)
    assert summary.table()["best validation loss"] == "–"


@pytest.mark.parametrize(("name", "start"), [("a.png", PNG), ("a.svg", b"<?xml")])
def test_draw_run_and_draw_schedule_write_images(tmp_path, name, start):
    train("sort-dedup", out=tmp_path / "run", overrides=SETTINGS)
    assert draw_run(tmp_path / "run", tmp_path / name).read_bytes().startswith(start)
    assert draw_schedule(WarmupCosine(0.001, 40, 1000), 1000, tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(StorageError, match=r"use \.png or \.svg"):
        draw_run(tmp_path / "run", tmp_path / "a.docx")
    with pytest.raises(StorageError, match=r"nothing does not exist; expected the folder of a training run"):
        draw_run(tmp_path / "nothing")


def test_read_log_corrupted_line_raises_storage_error(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\nnonsense\n{"kind": "train", "step": 2}\n')
    with pytest.raises(StorageError, match="line 2: not a row"):
        read_log(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    assert [row["step"] for row in read_log(tmp_path)] == [1]


def test_train_init_starts_with_parameters_and_tokenizer(tmp_path, data):
    settings = FEW | SMALL["translation"]
    first = train("translation", data=data["translation"], out=tmp_path / "first", overrides=settings)
    still = settings | {"steps": 3, "warmup_steps": 3, "lr_max": 1e-30, "weight_decay": 0.0, "eval_every": 1}
    more = tmp_path / "more"
    more.mkdir()
    (more / "train.tsv").write_text(pairs(67, start=900))  # other words: a newly trained tokenizer would differ
    (more / "dev.tsv").write_text(pairs(13, start=500))
    second = train("translation", data=more, out=tmp_path / "second", init=first.model, overrides=still)
    assert second.valid_loss == pytest.approx(first.valid_loss, rel=1e-6)
    ids = [base.load_tokenizer(folder).encode("to 7 a") for folder in (first.model, second.model)]
    assert ids[0] == ids[1]


class KilledAfter(Progress):
    """Interrupt the run after a step; nothing is saved on exit, as with kill -9."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, step):
        if step == self.step:
            raise KeyboardInterrupt


def test_train_init_run_resumes_from_initial_parameters(tmp_path, data):
    settings = FEW | SMALL["translation"] | {"checkpoint_every": 100}
    first = train("translation", data=data["translation"], out=tmp_path / "first", overrides=settings)
    expected = train(
        "translation", data=data["translation"], out=tmp_path / "whole", init=first.model, overrides=settings
    )
    with pytest.raises(KeyboardInterrupt):
        train(
            "translation",
            data=data["translation"],
            out=tmp_path / "broken",
            init=first.model,
            overrides=settings,
            progress=KilledAfter(2),
        )
    again = train(resume=tmp_path / "broken")
    assert again.valid_loss == expected.valid_loss


@pytest.mark.bad_input
def test_train_init_with_other_sizes_raises_config_error(tmp_path, data):
    settings = FEW | SMALL["translation"]
    first = train("translation", data=data["translation"], out=tmp_path / "first", overrides=settings)
    with pytest.raises(ConfigError, match=r"init: .* is \[.*\] in .*, expected \[.*\];"):
        train("translation", data=data["translation"], init=first.model, overrides=settings | {"d_ff": 17})


def test_train_phrases_are_in_training_only(data):
    from clearhead.training.tasks import TranslationData

    plain = TranslationData(path=str(data["translation"]), vocab_size=300)
    phrased = plain.replace(phrases=(("so", "thus"), ("if", "then")), phrase_copies=3)
    before, after = plain.load(), phrased.load()
    assert len(after.train) == len(before.train) + 6
    assert len(after.validation) == len(before.validation)
    assert after.train.sources[-6:] == ["so", "if"] * 3
    assert after.train.targets[-2:] == ["thus", "then"]


@pytest.mark.bad_input
def test_translation_data_empty_phrase_raises_config_error():
    from clearhead.training.tasks import TranslationData

    with pytest.raises(ConfigError, match="expected pairs of non-empty texts"):
        TranslationData(phrases=(("so", " "),))


class RecordCuDNN(Progress):
    """Record after each step whether cuDNN's attention is enabled."""

    def __init__(self):
        self.states = []

    def on_step_end(self, step):
        self.states.append(torch.backends.cuda.cudnn_sdp_enabled())


def test_kernels_for_token_budget_excludes_cudnn(tmp_path, data):
    """cuDNN initializes itself for every new shape, so it is disabled during the run and enabled again afterwards."""
    recorded = RecordCuDNN()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    train(
        "translation",
        data=data["translation"],
        out=tmp_path / "run",
        overrides=FEW | SMALL["translation"],
        progress=recorded,
    )
    assert recorded.states == [False] * FEW["steps"]
    assert torch.backends.cuda.cudnn_sdp_enabled()
