"""Runs of the speech task: overfitting a tiny data set, and its evaluation."""

from __future__ import annotations

import pytest

from clearhead.errors import DataError
from clearhead.hub import evaluate, pipeline
from clearhead.hub.evaluate import RecordingScores
from clearhead.training import train
from tests.support.recordings import recorded

SETTINGS = {
    "d_model": 24,
    "n_heads": 2,
    "n_layers": 1,
    "frame_stacking": 4,
    "model.dropout": 0.0,
    "data.mel.n_mels": 20,
    "streams": '{type = "StreamSettings", seconds = 0.6, digits = [0, 2], pause = [0.0, 0.2], clean = 0.3}',
    "n_validation": 5,
    "steps": 180,
    "warmup_steps": 20,
    "lr_max": 0.01,
    "eval_every": 180,
    "checkpoint_every": 181,
    "batch.examples": 12,
    "device": "cpu",
}


def test_speech_run_overfits_a_tiny_set(tmp_path):
    data = recorded(tmp_path / "data", ("ann",), (9, 10))
    summary = train("speech", data=data, out=tmp_path / "run", overrides=SETTINGS)
    assert summary.train_loss < 0.3
    trained = pipeline(tmp_path / "run")
    assert trained.task == "speech"
    assert trained.model.config.mel.n_mels == 20
    assert trained.model.config.mean != 0.0  # measured on the training part
    single = evaluate(trained, data)
    assert single.examples == 10
    assert single.accuracy >= 0.9
    for path in data.glob("*_9.wav"):
        path.unlink()  # without validation recordings, training recordings are evaluated
    assert evaluate(trained, data, limit=4).examples == 4
    streams = evaluate(trained, data, streams=True)
    assert streams.digit_error_rate < 0.5
    assert streams.latency_median <= streams.latency_95
    assert streams.to_dict()["decoding"] == "greedy CTC"


def test_evaluation_latencies_cover_correct_digits_only():
    heard = RecordingScores(
        n_exact=1, n_errors=3, n_digits=12, n_recordings=4, latencies=tuple(i / 100 for i in range(20))
    )
    assert heard.accuracy == 0.25
    assert heard.error_rate == 0.25
    assert heard.latency_quantile(0.5) == 0.10
    assert heard.latency_quantile(0.95) == 0.19
    silent = RecordingScores(n_exact=0, n_errors=1, n_digits=1, n_recordings=1, latencies=())
    assert silent.latency_quantile(0.5) is None


@pytest.mark.bad_input
def test_evaluation_counts_mistakes(tmp_path):
    with pytest.raises(DataError, match=r"7_jackson_32\.wav"):
        train("speech", out=tmp_path / "run")
    with pytest.raises(DataError, match="this needs a model for speech"):
        evaluate(pipeline("sort-dedup"), streams=True)
