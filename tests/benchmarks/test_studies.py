"""Studies: smoke runs, resumable results files, conclusions from rows, and tasks."""

from __future__ import annotations

import json
import multiprocessing.dummy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import studies
from benchmarks.studies import head_patterns, heads, learning, no_attention_bottleneck, positions, speech, stability
from benchmarks.studies.runner import Record, Sizes, StudyResults, StudyRow, draw_study, run_study
from clearhead.course import claims
from clearhead.errors import ConfigError, StorageError
from clearhead.models import DecoderConfig
from clearhead.training import WarmupCosine
from tests.support.recordings import recorded

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def results_of(values_by_configuration):
    """Return results from {(facet, series): [values of seed 0, values of seed 1, …]}."""
    return StudyResults(
        [
            StudyRow(facet, series, seed, values, {}, 1.0, 0)
            for (facet, series), values_of_seeds in values_by_configuration.items()
            for seed, values in enumerate(values_of_seeds)
        ]
    )


def conclusion(module, values_by_configuration):
    """Return the conclusion of a study."""
    return module.conclude(module.STUDY.sizes, results_of(values_by_configuration))


class Toy:
    """A study without training that records its configurations and can be interrupted."""

    def __init__(self, stop_after=99):
        self.configurations, self.stop_after = [], stop_after
        self.study = replace(
            heads.STUDY,
            name="toy",
            facet=("task", ("p", "q")),
            series=("heads", ("1", "2")),
            measure=self.measure,
            conclude=lambda sizes, results: f"{len(results.rows)} rows",
        )

    def measure(self, sizes, facet, series, seed):
        if len(self.configurations) == self.stop_after:
            raise KeyboardInterrupt
        self.configurations.append((facet, series, seed))
        return {"1": torch.rand(()).item(), "2": None}, {"steps": sizes.steps}


class TestEveryStudy:
    @pytest.mark.parametrize("name", studies.STUDIES)
    def test_smoke_run_writes_results_and_plot(self, name, tmp_path):
        study, out, data = studies.study(name), tmp_path / "s.json", None
        if study.data_description:  # fewer configurations, because each one trains with all its files
            series, speakers = study.series[1][:3:2], ("george", "lucas")
            study, data = replace(study, series=(study.series[0], series)), recorded(tmp_path / "recordings", speakers)
        record = run_study(study, out, seeds=1, smoke=True, data=data)
        expected = {(facet, series, 0) for facet in study.facet[1] for series in study.series[1]}
        assert {(row.facet, row.series, row.seed) for row in record.rows} == expected
        assert all(row.values for row in record.rows)
        assert studies.read(out).rows == record.rows
        document = json.loads(out.read_text())
        assert document["conclusion"] == record.conclusion
        assert {"command", "machine", "versions"} <= document["runs"][0].keys()
        command = f"python -m benchmarks study {name} --seeds 1 --smoke" + " --data PATH" * bool(data)
        assert document["runs"][0]["command"] == command
        svg = draw_study(record, tmp_path / "s.svg").read_text()
        assert all(facet in svg for facet in study.facet[1])
        assert draw_study(record, tmp_path / "again.svg").read_text() == svg

    @pytest.mark.parametrize("name", studies.STUDIES)
    def test_committed_results_are_complete_and_match_their_conclusion(self, name):
        record = studies.read(RESULTS / f"study-{name}.json")
        study = record.study
        expected = {(f, s, seed) for f in study.facet[1] for s in study.series[1] for seed in range(study.seeds)}
        assert {(row.facet, row.series, row.seed) for row in record.rows} == expected
        assert not record.smoke
        assert json.loads((RESULTS / f"study-{name}.json").read_text()) == json.loads(json.dumps(record.to_dict()))

    def test_same_seed_returns_same_values(self, tmp_path):
        first, second = (run_study(heads.STUDY, tmp_path / f"{n}.json", seeds=1, smoke=True) for n in "ab")
        assert [row.values for row in first.rows] == [row.values for row in second.rows]


class TestResultsFile:
    def test_interrupted_study_resumes(self, tmp_path):
        out, interrupted, resumed = tmp_path / "toy.json", Toy(stop_after=3), Toy()
        with pytest.raises(KeyboardInterrupt):
            run_study(interrupted.study, out, seeds=2)
        earlier = Record.read(out, {"toy": interrupted.study}).rows
        assert [(row.facet, row.series, row.seed) for row in earlier] == interrupted.configurations
        record = run_study(resumed.study, out, seeds=2)
        assert set(interrupted.configurations).isdisjoint(resumed.configurations)
        assert record.rows[:3] == earlier
        assert len(record.rows) == 8
        assert len(record.runs) == 1
        assert Toy().study.conclude(None, StudyResults(record.rows)) == json.loads(out.read_text())["conclusion"]

    def test_more_seeds_are_recorded_as_another_run(self, tmp_path):
        run_study(Toy().study, tmp_path / "toy.json", seeds=1)
        second = Toy()
        record = run_study(second.study, tmp_path / "toy.json", seeds=2)
        assert {seed for _, _, seed in second.configurations} == {1}
        assert [run["command"][-1] for run in record.runs] == ["1", "2"]
        assert {(row.seed, row.run) for row in record.rows} == {(0, 0), (1, 1)}

    def test_rows_of_several_processes_equal_those_of_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: multiprocessing.dummy)
        records = [run_study(Toy().study, tmp_path / f"{jobs}.json", seeds=2, jobs=jobs) for jobs in (1, 3)]
        orders = [[(row.facet, row.series, row.seed) for row in record.rows] for record in records]
        assert orders[0] == orders[1]

    def test_run_study_preserves_the_global_random_state(self, tmp_path):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        run_study(Toy().study, tmp_path / "toy.json", seeds=1)
        torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)

    @pytest.mark.bad_input
    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"study": "toy", "smoke": false, "runs": [], "rows": [3]}'])
    def test_malformed_results_file_raises_and_is_unchanged(self, tmp_path, text):
        out = tmp_path / "toy.json"
        out.write_text(text)
        with pytest.raises(StorageError, match="cannot be read as a study's results"):
            run_study(Toy().study, out)
        assert out.read_text() == text

    @pytest.mark.bad_input
    def test_results_of_other_sizes_or_studies_raise(self, tmp_path):
        out = tmp_path / "toy.json"
        toy = Toy().study
        run_study(toy, out, seeds=1)
        before = out.read_bytes()
        for study, smoke, message in (
            (toy, True, "was measured without --smoke"),
            (replace(toy, sizes=Sizes(steps=7)), False, "other sizes"),
            (replace(toy, name="other"), False, "the study is 'toy', expected other"),
        ):
            with pytest.raises(StorageError, match=message):
                run_study(study, out, smoke=smoke)
        assert out.read_bytes() == before

    @pytest.mark.bad_input
    def test_invalid_arguments_raise(self, tmp_path):
        with pytest.raises(ConfigError, match="unknown study 'position'; did you mean 'positions'"):
            studies.study("position")
        for study, data, message in (
            (speech.STUDY, None, "speech needs data: recordings"),
            (heads.STUDY, tmp_path, "own data"),
        ):
            with pytest.raises(ConfigError, match=message):
                run_study(study, tmp_path / "toy.json", data=data)
        with pytest.raises(ConfigError, match="seeds"):
            run_study(Toy().study, tmp_path / "toy.json", seeds=0)
        with pytest.raises(StorageError, match="no row yet"):
            draw_study(Record(Toy().study, False), tmp_path / "x.svg")


class TestConclusions:
    def test_format_mean_includes_range_if_it_differs_as_printed(self):
        results = results_of({("p", "1"): [{"8": 0.5}, {"8": 0.7}], ("p", "2"): [{"8": 0.991}, {"8": 0.992}]})
        assert results.format_mean("p", "1", "8") == "60% (50% to 70%)"
        assert results.format_mean("p", "2", "8") == "99%"
        assert results.format_mean("p", "3", "8") == "no value"

    def test_mean_ignores_missing_values(self):
        results = results_of({("p", "1"): [{"8": 0.5}, {"8": None}]})
        assert results.mean("p", "1", "8") == 0.5
        assert results.mean("p", "1", "9") is None

    def test_conclusion_summarizes_rows(self):
        fixed, attention = no_attention_bottleneck.FIXED, no_attention_bottleneck.ATTENTION
        rows = {
            ("copy", fixed): [{"4": 1.0, "24": 0.5}, {"4": 0.8, "24": 0.7}],
            ("copy", attention): [{"4": 1.0, "24": 0.9}, {"4": 1.0, "24": 0.8}],
        }
        assert conclusion(no_attention_bottleneck, rows) == (
            "Token accuracy as the source grows from 4 to 24 tokens. copy: recurrent, one fixed vector 90% (80% to "
            "100%) → 60% (50% to 70%); recurrent, attention 100% → 85% (80% to 90%); the fixed vector loses more than "
            "attention in 1 of 2 seeds."
        )
        rows = {("two places", "1"): [{"2": 0.6}, {"2": 0.97}], ("two places", "2"): [{"2": 1.0}, {"2": 1.0}]}
        assert conclusion(heads, rows) == (
            "Accuracy by number of heads. two places: 1 78% (60% to 97%), 2 100%; two heads beat one by more than 5% "
            "in 1 of 2 seeds."
        )
        rows = {
            ("t", "rotary"): [{"16": 1.0, "64": 0.75}],
            ("t", "learned"): [{"16": 0.96, "64": None}],
            ("t", "none"): [{"16": 0.3, "64": 0.2}],
            ("u", "none"): [{"16": 0.3, "64": 0.2}],
        }
        assert conclusion(positions, rows) == (
            "Trained on at most 16 tokens. t: 2 of 3 encodings reach 95% at 16 tokens, of which at 64 tokens rotary "
            "has 75%; learned raises an error. u: 0 of 3 encodings reach 95% at 16 tokens."
        )
        rows = {
            ("post-norm", "no clipping"): [{"5": 3.0, "10": 0.05}] * 3,
            ("post-norm", "no warm-up"): [{"5": 3.0, "10": 0.05}, {"5": 3.0, "10": 2.5}, {"5": 3.0, "10": None}],
        }
        assert conclusion(stability, rows) == (
            "Recipes that reach a loss below 0.1 nats with 8 layers at a learning rate of 0.005. post-norm: 1 of 2 "
            "recipes in every seed; no warm-up in 1 of 3, to 1.3 (0.05 to 2.5)."
        )
        scores = {"diagonal": 0.9, "punctuation": 0.2, "first token": 0.5, "last token": 0.1}
        rows = {("m", "trained"): [scores], ("m", "untrained"): [dict.fromkeys(scores, 0.15)]}
        assert conclusion(head_patterns, rows) == (
            "The three patterns with the largest increase by training, as the share of attention of their best head. "
            "m: diagonal 90%, untrained 15%; first token 50%, untrained 15%; punctuation 20%, untrained 15%."
        )


class TestTasks:
    def test_labels_of_position_tasks_equal_a_loop(self):
        """Compare each label with the ids, in a loop over rows and positions."""
        sizes, seed = Sizes(symbols=7), torch.Generator().manual_seed(3)
        for task, source in ((positions.DISTANCE, lambda t: t - 3), (positions.POSITION, lambda t: 3)):
            batch = positions.draw(sizes, task, 5, 11, seed)
            for b in range(5):
                for t in range(11):
                    is_counted = source(t) >= 0 and (task == positions.DISTANCE or t > 3)
                    assert batch.weights[b, t] == is_counted
                    assert not is_counted or batch.labels[b, t] == batch.ids[b, source(t)]
        batch = positions.draw(sizes, positions.MARK, 5, 11, seed)
        for b in range(5):
            (mark,) = [t for t in range(11) if batch.ids[b, t] >= 7]
            assert batch.weights[b].tolist() == [t > mark for t in range(11)]
            assert (batch.labels[b] == batch.ids[b, mark] - 7).all()

    @pytest.mark.parametrize("task", heads.TASKS)
    def test_label_encodes_the_symbol_at_each_distance(self, task):
        n, distances = heads.TASKS[task]
        batch = heads.draw(Sizes(length=13), task, 3, torch.Generator().manual_seed(1))
        assert n ** len(distances) == 16
        for b in range(3):
            for t in range(max(distances), 13):
                symbols = [int(batch.labels[b, t]) // n**k % n for k in reversed(range(len(distances)))]
                assert symbols == [int(batch.ids[b, t - d]) for d in distances]

    def test_target_is_the_labels_shifted_by_one(self):
        batch = no_attention_bottleneck.draw(Sizes(symbols=5), "reverse", 3, 7, torch.Generator().manual_seed(1))
        assert batch.labels.tolist() == [row[::-1] for row in batch.source.tolist()]
        assert batch.target[:, 1:].tolist() == batch.labels[:, :-1].tolist()
        assert set(batch.target[:, 0].tolist()) == {5}

    def test_fit_learns_and_stops_at_a_loss_that_is_not_finite(self):
        torch.manual_seed(0)
        model = DecoderConfig(vocab_size=5, max_len=7, d_model=8, n_heads=2, n_layers=1, tie_embeddings=False).build()
        ids, losses = torch.randint(5, (3, 7)), []
        batch = learning.tokens(ids, ids, torch.arange(7) >= 0)
        learning.fit(model, lambda: batch, WarmupCosine(0.03, 0, 40), after=lambda step, loss: losses.append(loss))
        assert len(losses) == 40
        assert losses[-1] < 0.2 * losses[0]
        assert learning.accuracy(model, batch) == 1.0
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        losses.clear()
        learning.fit(model, lambda: batch, WarmupCosine(0.03, 0, 40), after=lambda step, loss: losses.append(loss))
        assert losses == []

    def test_values_after_divergence_are_missing(self, monkeypatch):
        def diverges(model, draw, schedule, *, limit, after):
            for step in (1, 2, 3):
                after(step, 2.0)

        monkeypatch.setattr(stability, "fit", diverges)
        values, _ = stability.measure(stability.STUDY.smoke, "pre-norm", "no warm-up", 0)
        assert values == {"1": 2.0, "2": 2.0, "3": 2.0, "4": None, "5": None}

    def test_speech_conclusion_lists_error_rates_and_latency(self):
        rows = {
            (speech.KNOWN_SPEAKERS, "unlimited"): [{speech.SINGLE: 0.01, speech.STREAMS: 0.02, speech.LATENCY: None}],
            (speech.KNOWN_SPEAKERS, "past"): [{speech.SINGLE: 0.02, speech.STREAMS: 0.03, speech.LATENCY: 0.25}],
        }
        assert conclusion(speech, rows) == (
            "Results by context of a frame. unlimited: error rate 2.0% in streams and 1.0% for single digits, 95 % "
            "latency the whole recording. past: error rate 3.0% in streams and 2.0% for single digits, 95 % latency "
            "0.25 s."
        )

    def test_claims_contain_the_committed_speech_study(self):
        published, bundled = (
            path / "study-speech.json" for path in (RESULTS, Path(claims.__file__).parent / "results")
        )
        assert published.read_bytes() == bundled.read_bytes()
