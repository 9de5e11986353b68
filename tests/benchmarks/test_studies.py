"""Studies: each runs in its quick form, its file goes on where it stopped, and its finding says what the rows say."""

from __future__ import annotations

import json
import multiprocessing.dummy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import studies
from benchmarks.studies import head_patterns, heads, learning, no_attention_bottleneck, positions, speech, stability
from benchmarks.studies.runner import Outcome, Record, Sizes, Trial, carry_out, draw_study
from clearhead.course import claims
from clearhead.errors import ConfigError, StorageError
from clearhead.models import DecoderConfig
from clearhead.training import WarmupCosine
from tests.data.recorded import recorded

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def made_up(values):
    """Rows from {(panel, line): [curve of seed 0, curve of seed 1, …]}."""
    return Outcome(
        [
            Trial(panel, line, seed, curve, {}, 1.0, 0)
            for (panel, line), curves in values.items()
            for seed, curve in enumerate(curves)
        ]
    )


def said(module, values):
    return module.finding(module.STUDY.sizes, made_up(values))


class Toy:
    """A study that trains nothing: it notes what it was asked for, and may be interrupted."""

    def __init__(self, stop_after=99):
        self.asked, self.stop_after = [], stop_after
        self.study = replace(
            heads.STUDY,
            name="toy",
            panel=("task", ("p", "q")),
            line=("heads", ("1", "2")),
            measure=self.measure,
            finding=lambda sizes, found: f"{len(found.rows)} rows",
        )

    def measure(self, sizes, panel, line, seed):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((panel, line, seed))
        return {"1": torch.rand(()).item(), "2": None}, {"steps": sizes.steps}


class TestEveryStudy:
    @pytest.mark.parametrize("name", studies.STUDIES)
    def test_its_quick_form_runs_and_is_drawn(self, name, tmp_path):
        study, out, data = studies.study(name), tmp_path / "s.json", None
        if study.reads:  # fewer choices, because each is a run with all its files
            lines, speakers = study.line[1][:3:2], ("george", "lucas")
            study, data = replace(study, line=(study.line[0], lines)), recorded(tmp_path / "recordings", speakers)
        record = carry_out(study, out, seeds=1, quick=True, data=data)
        wanted = {(panel, line, 0) for panel in study.panel[1] for line in study.line[1]}
        assert {(row.panel, row.line, row.seed) for row in record.rows} == wanted
        assert all(row.curve for row in record.rows)
        assert studies.read(out).rows == record.rows
        document = json.loads(out.read_text())
        assert document["finding"] == record.finding
        assert {"command", "machine", "versions"} <= document["runs"][0].keys()
        command = f"python -m benchmarks study {name} --seeds 1 --smoke" + " --data PATH" * bool(data)
        assert document["runs"][0]["command"] == command
        drawn = draw_study(record, tmp_path / "s.svg").read_text()
        assert all(panel in drawn for panel in study.panel[1])
        assert draw_study(record, tmp_path / "again.svg").read_text() == drawn

    @pytest.mark.parametrize("name", studies.STUDIES)
    def test_what_is_committed_is_whole_and_says_what_its_rows_say(self, name):
        record = studies.read(RESULTS / f"study-{name}.json")
        study = record.study
        wanted = {(p, line, seed) for p in study.panel[1] for line in study.line[1] for seed in range(study.seeds)}
        assert {(row.panel, row.line, row.seed) for row in record.rows} == wanted
        assert not record.quick
        assert json.loads((RESULTS / f"study-{name}.json").read_text()) == json.loads(json.dumps(record.to_dict()))

    def test_a_seed_gives_its_row_again(self, tmp_path):
        first, second = (carry_out(heads.STUDY, tmp_path / f"{n}.json", seeds=1, quick=True) for n in "ab")
        assert [row.curve for row in first.rows] == [row.curve for row in second.rows]


class TestTheFile:
    def test_an_interrupted_study_goes_on(self, tmp_path):
        out, halted, rest = tmp_path / "toy.json", Toy(stop_after=3), Toy()
        with pytest.raises(KeyboardInterrupt):
            carry_out(halted.study, out, seeds=2)
        kept = Record.read(out, {"toy": halted.study}).rows
        assert [(row.panel, row.line, row.seed) for row in kept] == halted.asked
        record = carry_out(rest.study, out, seeds=2)
        assert set(halted.asked).isdisjoint(rest.asked)
        assert record.rows[:3] == kept
        assert len(record.rows) == 8
        assert len(record.runs) == 1
        assert Toy().study.finding(None, Outcome(record.rows)) == json.loads(out.read_text())["finding"]

    def test_more_seeds_are_another_run_and_its_rows_say_so(self, tmp_path):
        carry_out(Toy().study, tmp_path / "toy.json", seeds=1)
        more = Toy()
        record = carry_out(more.study, tmp_path / "toy.json", seeds=2)
        assert {seed for _, _, seed in more.asked} == {1}
        assert [run["command"][-1] for run in record.runs] == ["1", "2"]
        assert {(row.seed, row.run) for row in record.rows} == {(0, 0), (1, 1)}

    def test_rows_of_many_processes_are_those_of_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.multiprocessing, "get_context", lambda how: multiprocessing.dummy)
        records = [carry_out(Toy().study, tmp_path / f"{jobs}.json", seeds=2, jobs=jobs) for jobs in (1, 3)]
        choices = [[(row.panel, row.line, row.seed) for row in record.rows] for record in records]
        assert choices[0] == choices[1]

    def test_the_callers_random_numbers_are_left_alone(self, tmp_path):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        carry_out(Toy().study, tmp_path / "toy.json", seeds=1)
        torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)

    @pytest.mark.bad_input
    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"study": "toy", "quick": false, "runs": [], "rows": [3]}'])
    def test_what_is_no_study_is_refused_and_kept(self, tmp_path, text):
        out = tmp_path / "toy.json"
        out.write_text(text)
        with pytest.raises(StorageError, match="cannot be read as a study's results"):
            carry_out(Toy().study, out)
        assert out.read_text() == text

    @pytest.mark.bad_input
    def test_rows_of_other_sizes_or_studies_are_not_mixed(self, tmp_path):
        out = tmp_path / "toy.json"
        toy = Toy().study
        carry_out(toy, out, seeds=1)
        before = out.read_bytes()
        for other, quick, told in (
            (toy, True, "was not made with --smoke"),
            (replace(toy, sizes=Sizes(steps=7)), False, "other sizes"),
            (replace(toy, name="other"), False, "the study 'toy' and not other"),
        ):
            with pytest.raises(StorageError, match=told):
                carry_out(other, out, quick=quick)
        assert out.read_bytes() == before

    @pytest.mark.bad_input
    def test_other_mistakes(self, tmp_path):
        with pytest.raises(ConfigError, match="there is no study 'position'; did you mean 'positions'"):
            studies.study("position")
        for study, data, told in (
            (speech.STUDY, None, "speech needs data: recordings"),
            (heads.STUDY, tmp_path, "own data"),
        ):
            with pytest.raises(ConfigError, match=told):
                carry_out(study, tmp_path / "toy.json", data=data)
        with pytest.raises(ConfigError, match="seeds"):
            carry_out(Toy().study, tmp_path / "toy.json", seeds=0)
        with pytest.raises(StorageError, match="no row yet"):
            draw_study(Record(Toy().study, False), tmp_path / "x.svg")


class TestFindings:
    def test_spread_is_told_where_it_shows(self):
        found = made_up({("p", "1"): [{"8": 0.5}, {"8": 0.7}], ("p", "2"): [{"8": 0.991}, {"8": 0.992}]})
        assert found.said("p", "1", "8") == "60% (50% to 70%)"
        assert found.said("p", "2", "8") == "99%"
        assert found.said("p", "3", "8") == "nothing"

    def test_a_missing_number_is_no_zero(self):
        found = made_up({("p", "1"): [{"8": 0.5}, {"8": None}]})
        assert found.mean("p", "1", "8") == 0.5
        assert found.mean("p", "1", "9") is None

    def test_each_study_says_what_its_rows_say(self):
        fixed, attending = no_attention_bottleneck.FIXED, no_attention_bottleneck.ATTENDING
        rows = {
            ("copy", fixed): [{"4": 1.0, "24": 0.5}, {"4": 0.8, "24": 0.7}],
            ("copy", attending): [{"4": 1.0, "24": 0.9}, {"4": 1.0, "24": 0.8}],
        }
        assert said(no_attention_bottleneck, rows) == (
            "Tokens written right as the source grows from 4 to 24 tokens. copy: recurrent, one fixed vector 90% (80% "
            "to 100%) → 60% (50% to 70%); recurrent, attention 100% → 85% (80% to 90%); the fixed vector loses more "
            "than attention in 1 of 2 seeds."
        )
        rows = {("two places", "1"): [{"2": 0.6}, {"2": 0.97}], ("two places", "2"): [{"2": 1.0}, {"2": 1.0}]}
        assert said(heads, rows) == (
            "Labels right by number of heads. two places: 1 78% (60% to 97%), 2 100%; two heads beat one by more than "
            "5% in 1 of 2 seeds."
        )
        rows = {
            ("t", "rotary"): [{"16": 1.0, "64": 0.75}],
            ("t", "learned"): [{"16": 0.96, "64": None}],
            ("t", "none"): [{"16": 0.3, "64": 0.2}],
            ("u", "none"): [{"16": 0.3, "64": 0.2}],
        }
        assert said(positions, rows) == (
            "Trained on at most 16 tokens. t: 2 of 3 encodings reach 95% at 16 tokens, of which at 64 tokens rotary "
            "has 75%; learned refuses. u: 0 of 3 encodings reach 95% at 16 tokens."
        )
        rows = {
            ("post-norm", "no clipping"): [{"5": 3.0, "10": 0.05}] * 3,
            ("post-norm", "no warm-up"): [{"5": 3.0, "10": 0.05}, {"5": 3.0, "10": 2.5}, {"5": 3.0, "10": None}],
        }
        assert said(stability, rows) == (
            "What learns, to a loss below 0.1 nats, with 8 layers at a learning rate of 0.005. post-norm: 1 of 2 "
            "recipes in every seed; no warm-up in 1 of 3, to 1.3 (0.05 to 2.5)."
        )
        scores = {"diagonal": 0.9, "punctuation": 0.2, "first token": 0.5, "last token": 0.1}
        rows = {("m", "trained"): [scores], ("m", "untrained"): [dict.fromkeys(scores, 0.15)]}
        assert said(head_patterns, rows) == (
            "The three patterns that training raised most, by the share of their best head's weight. m: diagonal 90%, "
            "untrained 15%; first token 50%, untrained 15%; punctuation 20%, untrained 15%."
        )


class TestTasks:
    def test_the_labels_of_each_task(self):
        """Each label from the ids by a loop over rows and places."""
        sizes, seed = Sizes(symbols=7), torch.Generator().manual_seed(3)
        for task, at in ((positions.DISTANCE, lambda t: t - 3), (positions.PLACE, lambda t: 3)):
            batch = positions.draw(sizes, task, 5, 11, seed)
            for b in range(5):
                for t in range(11):
                    known = at(t) >= 0 and (task == positions.DISTANCE or t > 3)
                    assert batch.weights[b, t] == known
                    assert not known or batch.labels[b, t] == batch.ids[b, at(t)]
        batch = positions.draw(sizes, positions.MARK, 5, 11, seed)
        for b in range(5):
            (mark,) = [t for t in range(11) if batch.ids[b, t] >= 7]
            assert batch.weights[b].tolist() == [t > mark for t in range(11)]
            assert (batch.labels[b] == batch.ids[b, mark] - 7).all()

    @pytest.mark.parametrize("task", heads.TASKS)
    def test_a_label_tells_every_place_of_it(self, task):
        n, distances = heads.TASKS[task]
        batch = heads.draw(Sizes(length=13), task, 3, torch.Generator().manual_seed(1))
        assert n ** len(distances) == 16
        for b in range(3):
            for t in range(max(distances), 13):
                told = [int(batch.labels[b, t]) // n**k % n for k in reversed(range(len(distances)))]
                assert told == [int(batch.ids[b, t - d]) for d in distances]

    def test_a_target_is_its_labels_one_place_later(self):
        batch = no_attention_bottleneck.draw(Sizes(symbols=5), "reverse", 3, 7, torch.Generator().manual_seed(1))
        assert batch.labels.tolist() == [row[::-1] for row in batch.source.tolist()]
        assert batch.target[:, 1:].tolist() == batch.labels[:, :-1].tolist()
        assert set(batch.target[:, 0].tolist()) == {5}

    def test_fitting_learns_and_stops_at_what_is_no_number(self):
        torch.manual_seed(0)
        model = DecoderConfig(vocab_size=5, max_len=7, d_model=8, n_heads=2, n_layers=1, tie_embeddings=False).build()
        ids, losses = torch.randint(5, (3, 7)), []
        batch = learning.tokens(ids, ids, torch.arange(7) >= 0)
        learning.fit(model, lambda: batch, WarmupCosine(0.03, 0, 40), after=lambda step, loss: losses.append(loss))
        assert len(losses) == 40
        assert losses[-1] < 0.2 * losses[0]
        assert learning.right(model, batch) == 1.0
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        losses.clear()
        learning.fit(model, lambda: batch, WarmupCosine(0.03, 0, 40), after=lambda step, loss: losses.append(loss))
        assert losses == []

    def test_a_curve_ends_where_the_loss_does(self, monkeypatch):
        def diverges(model, draw, schedule, *, limit, after):
            for step in (1, 2, 3):
                after(step, 2.0)

        monkeypatch.setattr(stability, "fit", diverges)
        curve, _ = stability.measure(stability.STUDY.quick, "pre-norm", "no warm-up", 0)
        assert curve == {"1": 2.0, "2": 2.0, "3": 2.0, "4": None, "5": None}

    def test_speech_says_what_is_paid_for_seeing_less(self):
        rows = {
            (speech.KNOWN, "everything"): [{speech.SINGLE: 0.01, speech.STREAMS: 0.02, speech.WAIT: None}],
            (speech.KNOWN, "the past"): [{speech.SINGLE: 0.02, speech.STREAMS: 0.03, speech.WAIT: 0.25}],
        }
        assert said(speech, rows) == (
            "What a moment sees, and what comes of it. everything: 2.0% of the digits in streams wrong and 1.0% of "
            "single ones, written down at the end. the past: 3.0% of the digits in streams wrong and 2.0% of single "
            "ones, written down after 0.25 s at most for 95 %."
        )

    def test_the_ledger_has_the_very_study(self):
        ours, theirs = (path / "study-speech.json" for path in (RESULTS, Path(claims.__file__).parent / "results"))
        assert ours.read_bytes() == theirs.read_bytes()
