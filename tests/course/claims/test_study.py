"""The study of Transformers against convolution: a tiny study, and claims judged from synthetic results."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from clearhead.course.claims import DOES_NOT_HOLD, HOLDS, HOLDS_CONDITIONALLY, claims, data_efficiency, inductive_bias
from clearhead.course.claims.data_efficiency import Interval
from clearhead.course.claims.study import ORIGINAL, PERMUTED, Study, Training
from clearhead.errors import ConfigError, DataError, StorageError
from tools.study.__main__ import main
from tools.study.networks import NETWORKS, describe
from tools.study.plan import Settings, factor, jobs
from tools.study.run import moved, run
from tools.study.training import Optimisation, Pictures, Trainer, order

# ---------------------------------------------------------------------- a tiny study

TINY = Settings(
    seconds=1e9,
    sizes=(17, 10_000),
    moved_sizes=(17,),
    large_sizes=(17,),
    seeds=1,
    more_seeds=0,
    held_out=11,
    tuning_size=17,
    tuning_steps=1,
    rates=(1e-3, 3e-3),
    min_steps=1,
    max_steps=1,
    optimisation=Optimisation(batch=5),
)


@pytest.fixture
def pictures(tmp_path):
    """Write 41 training and 13 validation images of noise."""
    g = np.random.default_rng(0)
    sizes = {"train": 41, "val": 13}
    arrays = {f"x_{k}": g.integers(0, 256, (n, 32, 32), dtype=np.uint8) for k, n in sizes.items()}
    arrays |= {f"y_{k}": g.integers(0, 10, n) for k, n in sizes.items()}
    np.savez(tmp_path / "pictures.npz", **arrays)
    return tmp_path / "pictures.npz"


def test_tiny_study_writes_rows(pictures, tmp_path):
    out = tmp_path / "deep" / "study.json"
    messages: list[str] = []
    study = run(pictures, out, TINY, device="cpu", say=messages.append)
    read = Study.read(out)
    assert read.rows == study.rows
    assert [(r.network, r.n_train, r.pictures) for r in study.rows] == [
        ("vit", 17, ORIGINAL),
        ("cnn", 17, ORIGINAL),
        ("vit", 30, ORIGINAL),
        ("cnn", 30, ORIGINAL),
        ("vit", 17, PERMUTED),
        ("cnn", 17, PERMUTED),
        ("exam-cnn", 17, ORIGINAL),
        ("exam-cnn", 30, ORIGINAL),
        ("exam-cnn", 17, PERMUTED),
        ("vit-large", 17, ORIGINAL),
    ]
    assert len({(r.network, r.lr) for r in study.rows}) == 4  # one learning rate per network
    assert all(0 <= r.validation <= 1 and 0 <= r.training <= 1 and r.seconds > 0 for r in study.rows)
    assert {"machine", "versions", "recipe", "networks", "data"} <= set(read.about)
    assert read.about["data"] == {"training": 30, "held_out": 11, "validation": 13, "picture": [32, 32]}
    assert {r.lr for r in study.rows} <= set(TINY.rates)
    assert any("ms per update" in line for line in messages)


def test_study_resumes_from_file(pictures, tmp_path):
    complete = run(pictures, tmp_path / "whole.json", TINY, device="cpu", say=lambda _: None)
    partial = Study(complete.about, complete.rows[:3])
    out = tmp_path / "half.json"
    messages: list[str] = []
    resumed = run(pictures, out, TINY, begun=partial, device="cpu", say=messages.append)
    assert not any("ms per update" in line for line in messages)  # nothing is tuned again
    without_seconds = [replace(row, seconds=0.0) for row in resumed.rows]
    assert without_seconds == [replace(row, seconds=0.0) for row in complete.rows]
    assert resumed.rows[:3] == complete.rows[:3]  # including seconds: they were not trained again
    assert Study.read(out).rows == resumed.rows
    (note,) = resumed.about["taken_up"]
    assert note["from_row"] == 3
    assert note["machine"]["gpu"] is None


def test_study_of_one_network_writes_its_rows(pictures, tmp_path):
    study = run(pictures, tmp_path / "s.json", TINY, only=["exam-cnn"], device="cpu", say=lambda _: None)
    assert {(row.network, row.pictures) for row in study.rows} == {("exam-cnn", ORIGINAL), ("exam-cnn", PERMUTED)}


def test_study_with_time_limit_reports_omitted_trainings(pictures, tmp_path):
    messages: list[str] = []
    study = run(pictures, tmp_path / "s.json", replace(TINY, seconds=1e-6), device="cpu", say=messages.append)
    assert not study.rows
    assert any(line.startswith("skipped because of the time limit") for line in messages)
    assert json.loads((tmp_path / "s.json").read_text())["rows"] == []


def test_compared_networks_have_similar_size():
    vit, cnn = (describe(name, (32, 32)) for name in ("vit", "cnn"))
    assert abs(vit["weights"] / cnn["weights"] - 1) < 0.05
    assert 0.5 < vit["multiplications"] / cnn["multiplications"] < 2
    assert describe("exam-cnn", (32, 32))["weights"] == 3722
    assert set(NETWORKS) == {"vit", "cnn", "vit-large", "exam-cnn"}


def test_training_reduces_loss_and_restarts():
    """Light and dark squares: learned in a few updates, and from the same start to the same end."""
    labels = torch.arange(48) % 2
    images = (labels * 2.0 - 1.0)[:, None, None, None].expand(48, 1, 32, 32).contiguous()
    images = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    data = Pictures(images, labels)
    trainer = Trainer("exam-cnn", (32, 32), Optimisation(batch=16), torch.device("cpu"), captured=True)
    ends = []
    for _ in range(2):
        trainer.run(data, steps=40, lr=1e-2, seed=3)
        ends.append([p.detach().clone() for p in trainer.network.parameters()])
    assert trainer.accuracy(data) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_each_epoch_contains_every_image_once():
    rows = order(7, 5, 4, seed=0).flatten()
    assert sorted(rows[:7].tolist()) == list(range(7))
    assert sorted(rows[7:14].tolist()) == list(range(7))


def test_moved_patches_are_a_fixed_permutation():
    x = torch.arange(2 * 8 * 12, dtype=torch.float32).view(2, 1, 8, 12)
    y = moved(x)

    def patches(images):
        return [
            images[:, 0, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten(1).tolist() for i in range(2) for j in range(3)
        ]

    assert sorted(map(str, patches(x))) == sorted(map(str, patches(y)))
    assert patches(x) != patches(y)


def test_study_runs_most_informative_trainings_first():
    settings = Settings()
    planned = jobs(settings, 27_227)
    assert [(j.network, j.seed) for j in planned[:10]] == [("vit", 0), ("cnn", 0)] * 5
    assert len(planned) == len(set(planned)) == 5 * 2 * 3 + 2 * 3 * 3 + 5 * 3 + 3 * 3 + 3 * 2 * 2
    assert {j.n_train for j in planned} == {250, 1_000, 4_000, 16_000, 27_227}
    pace = {"vit": 1e-3, "cnn": 1e-3, "exam-cnn": 4e-4, "vit-large": 3e-3}
    assert factor(settings, planned, pace, 1e9) == 2.0
    assert factor(settings, planned, pace, 1.0) == 0.5
    needed = sum(settings.steps(j.n_train) * pace[j.network] for j in planned)
    assert factor(settings, planned, pace, needed) == pytest.approx(0.9)


@pytest.mark.bad_input
def test_invalid_study_raises(pictures, tmp_path, capsys):
    with pytest.raises(ConfigError, match="a learning rate to choose"):
        Settings(rates=())
    with pytest.raises(DataError, match="got 41 training pictures, expected more than the 41 held out"):
        run(pictures, tmp_path / "s.json", replace(TINY, held_out=41), device="cpu")
    with pytest.raises(StorageError, match=r"file .* does not exist"):
        Study.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"rows": [{"network": "vit"}]}')
    with pytest.raises(StorageError, match="is not a results file of the study"):
        Study.read(tmp_path / "bad.json")
    assert main(["--data", str(tmp_path / "nothing"), "--out", str(tmp_path / "s.json")]) == 1
    assert capsys.readouterr().err.startswith("study: ")


# ---------------------------------------------------------------------- the claims

SIZES = (250, 1_000, 4_000, 16_000, 27_000)


def synthetic_study(**changed: tuple[float, ...]) -> Study:
    """Accuracies by network over SIZES, three seeds that differ by a tenth of a point."""
    curves = {
        "vit": (0.20, 0.30, 0.55, 0.75, 0.80),
        "cnn": (0.30, 0.50, 0.80, 0.88, 0.90),
        "vit-large": (0.19, 0.28, 0.53, 0.76, 0.82),
        "cnn moved": (0.20, 0.25, 0.50, 0.70, 0.75),
        "vit moved": (0.20, 0.30, 0.55, 0.75, 0.80),
    } | changed
    rows = []
    for name, curve in curves.items():
        network, _, moved_too = name.partition(" ")
        for n, value in zip(SIZES, curve, strict=True):
            for seed in range(3):
                row = Training(
                    network=network,
                    n_train=n,
                    seed=seed,
                    pictures=PERMUTED if moved_too else ORIGINAL,
                    steps=1,
                    lr=1e-3,
                    validation=value + 0.001 * seed * (1 if network == "cnn" else -1),
                    training=1.0,
                    seconds=1.0,
                )
                rows.append(row)
    networks = {name: {"weights": 7, "multiplications": 3} for name in NETWORKS}
    return Study({"networks": networks, "data": {"validation": 2_500}}, rows)


BETTER = (0.40, 0.60, 0.90, 0.95, 0.97)


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("cnn-better-on-little", {}, HOLDS),
        ("cnn-better-on-little", {"vit": BETTER}, DOES_NOT_HOLD),
        ("gap-narrows", {"vit": (0.1, 0.3, 0.55, 0.75, 0.8)}, HOLDS_CONDITIONALLY),  # in points, and not in errors
        ("gap-narrows", {"vit": (0.1, 0.3, 0.55, 0.8, 0.89)}, HOLDS),
        ("gap-narrows", {"vit": (0.2, 0.3, 0.55, 0.6, 0.6)}, DOES_NOT_HOLD),
        ("cnn-data-efficient", {}, HOLDS),
        ("cnn-data-efficient", {"vit": BETTER}, DOES_NOT_HOLD),
        ("locality-helps", {}, HOLDS),
        ("locality-helps", {"cnn moved": (0.30, 0.50, 0.80, 0.88, 0.90)}, DOES_NOT_HOLD),
    ],
)
def test_study_verdict_depends_on_results(monkeypatch, name, changed, verdict):
    study = synthetic_study(**changed)
    for module in (data_efficiency, inductive_bias):
        monkeypatch.setattr(module, "study", lambda: study)
    outcome = claims()[name].run()
    assert outcome.verdict == verdict, outcome.evidence
    if verdict == DOES_NOT_HOLD:
        assert outcome.correction
    if outcome.figure is not None:
        assert len(outcome.figure.series) >= 2


@pytest.mark.parametrize(("training", "is_noted"), [(1.0, True), (0.97, False)])
def test_overfitting_is_noted_only_if_all_trainings_fit_completely(monkeypatch, training, is_noted):
    study = synthetic_study()
    study.rows[0] = replace(study.rows[0], training=training)
    monkeypatch.setattr(data_efficiency, "study", lambda: study)
    notes = claims()["cnn-better-on-little"].run().notes
    assert any("overfitting" in note for note in notes) == is_noted


def test_times_as_many_interpolates_curve(monkeypatch):
    study = synthetic_study(vit=(0.201, 0.301, 0.501, 0.701, 0.901))  # seeds 0, 1, 2 subtract 0, 0.001 and 0.002
    monkeypatch.setattr(data_efficiency, "study", lambda: study)
    assert data_efficiency.times_as_many(250, 0.30, SIZES) == pytest.approx(4.0)  # reached with 1,000
    assert data_efficiency.times_as_many(1_000, 0.40, SIZES) == pytest.approx(2.0)  # half way from 1,000 to 4,000
    assert data_efficiency.times_as_many(4_000, 0.95, SIZES) is None
    assert data_efficiency.times_as_many(1_000, 0.1, SIZES) == 0.25


def test_interval_matches_student_and_normal_quantiles():
    """The mean of 1, 2, 3, 4 is 2.5 ± 3.182 · s/2 with s² = 5/3; with one or two seeds the sampling error is used."""
    interval = Interval.of([0.01, 0.02, 0.03, 0.04], sampling=9.0)
    assert interval.mean == pytest.approx(0.025)
    assert interval.half == pytest.approx(0.01 * 3.182 * math.sqrt(5 / 3) / 2)
    assert (interval.above, interval.below) == (True, False)
    assert str(interval) == "+2.5 ± 2.1 points (4 seeds)"
    single = Interval.of([-0.03], sampling=0.01)
    assert single.half == pytest.approx(0.0196)
    assert single.below
    assert str(single) == "−3.0 ± 2.0 points (1 seed)"


def test_sampling_error_matches_binomial(monkeypatch):
    study = synthetic_study()
    study.rows = [row for row in study.rows if row.seed == 0]
    monkeypatch.setattr(data_efficiency, "study", lambda: study)
    difference = data_efficiency.lead("cnn", "vit", 1_000)
    assert difference.half == pytest.approx(1.96 * math.sqrt((0.5 * 0.5 + 0.3 * 0.7) / 2_500))


def test_bundled_study_file_is_complete():
    """Both compared networks have five sizes, and learning rates from their own tuning."""
    study = Study.read()
    assert len(study.sizes(["vit", "cnn"])) == 5
    assert study.about["machine"]["gpu"]
    assert study.about["data"]["validation"] > 2_000
    for name in ("vit", "cnn"):
        tuning = study.about["networks"][name]["tuning"]
        best = max(tuning, key=lambda result: result["held_out"])
        assert {row.lr for row in study.rows if row.network == name} == {best["lr"]}
