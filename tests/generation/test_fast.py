"""The fast way against the plain one: the same ids, log-probabilities and scores, for every model that it takes.

On the CPU the fast way reads the places in use. What a GPU records, steps of fixed shapes over a room of fixed size,
runs here too, without being recorded: `fixed` asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from clearhead.attention import Biases
from clearhead.generation import Beam, adapters, fast, generate, stream
from clearhead.generation.adapters import stepper_for
from clearhead.generation.fast import Fast, bucket, kept_of
from clearhead.layers import GELU, GeGLU, Parallel, PostNorm, ReLU, RMSNorm, SiLU, SwiGLU
from clearhead.masks import blocks, causal, dilated, every, full, lookback, prefix, window
from clearhead.positions import ALiBi, RelativeBias, Rotary, Sinusoidal, Yarn
from tests.generation.small import STOP, VOCAB, decoder, encoder_decoder, prompts
from tests.generation.test_models import CONTINUING, READING, STRATEGIES, assert_equal

MAX_NEW = 13
FURTHER = {
    "post-norm": lambda: decoder(residual=PostNorm(), activation=ReLU()),
    "rms-swiglu": lambda: decoder(norm=RMSNorm(), activation=SwiGLU(), positions=Rotary(fraction=0.5), bias=False),
    "embedding-norm": lambda: decoder(embedding_norm=True, scaled_embedding=True, activation=GELU(tanh=True)),
    "parallel": lambda: decoder(
        residual=Parallel(), norm=RMSNorm(plus_one=True), qk_norm=RMSNorm(), activation=GeGLU()
    ),
    "some-biases": lambda: decoder(bias=Biases(k=False, out=False), activation=SiLU(slope=1.7)),
    "stretched": lambda: decoder(positions=Rotary(stretch=Yarn(factor=3.0, trained_len=9))),
    "ring": lambda: decoder(mask=causal() & window(4, 0), positions=Rotary()),
    "ring-learned": lambda: decoder(mask=window(3, 0)),
    "ring-alibi": lambda: decoder(mask=causal() & window(4, 0), positions=ALiBi()),
    "ring-relative": lambda: decoder(mask=window(4, 0), positions=RelativeBias(bidirectional=False)),
    "sometimes-nothing": lambda: decoder(mask=causal() & dilated(3) & every(2)),
    "cross-grouped": lambda: encoder_decoder(n_heads=4, n_kv_heads=2, positions=RelativeBias(), share_embeddings=False),
    "cross-qk-norm": lambda: encoder_decoder(qk_norm=RMSNorm(), residual=Parallel()),
    "cross-post-norm": lambda: encoder_decoder(residual=PostNorm(), positions=Sinusoidal()),
}
NOT_TAKEN = {"lstm", "gru", "ahead", "after-step", "before-step"}
CASES = [
    *(("continue", name, build) for name, build in CONTINUING.items() if name not in NOT_TAKEN),
    *(("read", name, build) for name, build in READING.items() if name not in NOT_TAKEN),
    *(("read" if name.startswith("cross") else "continue", name, build) for name, build in FURTHER.items()),
]


@pytest.fixture
def plain(monkeypatch):
    """A context in which the plain way is taken."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(adapters, "why_not", lambda model: "the test asks for the plain way")
            return call()

    return run


@pytest.fixture
def fixed(monkeypatch):
    monkeypatch.setattr(fast, "records", lambda device: True)


def arguments(kind):
    return (prompts(VOCAB), None) if kind == "continue" else (prompts(19), 4)


PLAIN = {}
"""What the plain way gives, by the case: two tests ask for it."""


@pytest.mark.parametrize("how", STRATEGIES, ids=lambda how: type(how).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_fast_way_gives_what_the_plain_way_gives(kind, name, build, how, plain):
    model, (rows, start) = build(), arguments(kind)
    options = {"how": how, "max_new": MAX_NEW, "stop": STOP, "start": start}
    PLAIN[kind, name, how] = plain(lambda: generate(model, rows, **options))
    assert_equal(generate(model, rows, **options), PLAIN[kind, name, how])


@pytest.mark.parametrize("how", STRATEGIES, ids=lambda how: type(how).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.usefixtures("fixed")
def test_steps_of_fixed_shapes_give_the_same(kind, name, build, how, plain):
    model, (rows, start) = build(), arguments(kind)
    options = {"how": how, "max_new": MAX_NEW, "stop": STOP, "start": start}
    wanted = PLAIN.get((kind, name, how)) or plain(lambda: generate(model, rows, **options))
    assert_equal(generate(model, rows, **options), wanted)
    again = generate(model, rows[::-1], **options)  # in the memory of the first, with other numbers in it
    assert_equal(again, plain(lambda: generate(model, rows[::-1], **options)))


def test_a_prompt_whose_beams_are_done_at_once_leaves_the_others_theirs():
    model, rows = decoder(), prompts(VOCAB)
    for stop in range(VOCAB):  # with each of them as a stop, some prompts are over after the first id
        options = {"how": Beam(3, length_penalty=0.0), "max_new": 4, "stop": stop}
        assert_equal(generate(model, rows, **options), generate(model, rows, **options, use_cache=False))


@pytest.mark.usefixtures("fixed")
def test_streams_of_one_model_do_not_share_their_memory():
    model = decoder()
    first, second = [3, 1, 4], [1, 5, 9]
    alone = [[int(step.ids[0]) for step in stream(model, row, max_new=30)] for row in (first, second)]
    pairs = list(zip(stream(model, first, max_new=30), stream(model, second, max_new=30), strict=True))
    assert [[int(step.ids[0]) for step in steps] for steps in zip(*pairs, strict=True)] == alone


@pytest.mark.usefixtures("fixed")
def test_a_stream_that_is_dropped_gives_its_memory_back():
    model = decoder()
    whole = generate(model, [3, 1, 4], max_new=30).ids[0, 0].tolist()
    steps = stream(model, [3, 1, 4], max_new=30)
    assert int(next(steps).ids[0]) == whole[0]
    steps.close()
    assert [int(step.ids[0]) for step in stream(model, [3, 1, 4], max_new=30)] == whole


def test_changed_weights_are_seen(plain):
    model = decoder()
    rows = prompts(VOCAB)
    first = generate(model, rows, max_new=9)
    program = kept_of(model).program
    with torch.no_grad():
        model.blocks[0].attention.k_proj.weight.neg_()
    assert kept_of(model).program is not program
    second = generate(model, rows, max_new=9)
    assert not torch.allclose(first.log_probs, second.log_probs)
    assert_equal(second, plain(lambda: generate(model, rows, max_new=9)))


def taken(model, rows=((1, 2),), start=None):
    stepper = stepper_for(model, [list(row) for row in rows], start=start, max_new=5, use_cache=True)
    return isinstance(stepper, Fast)


def test_who_is_watched_or_changed_takes_the_plain_way():
    model = decoder()
    assert taken(model)
    handle = model.blocks[1].register_forward_hook(lambda *_: None)
    assert not taken(model)
    handle.remove()
    assert taken(model)
    model.blocks[0].attention.impl = "reference"
    assert not taken(model)
    model = decoder()
    model.blocks[0].feed_forward.up = torch.nn.Sequential(model.blocks[0].feed_forward.up)
    assert not taken(model)
    pair = encoder_decoder()
    assert taken(pair, start=4)
    pair.encoder.blocks[0].register_forward_pre_hook(lambda *_: None)
    assert not taken(pair, start=4)


def test_a_window_keeps_the_window_only():
    model = decoder(mask=causal() & window(4, 0), positions=Rotary())
    stepper = stepper_for(model, [[3, 1, 4, 1, 5, 9, 2, 6]], start=None, max_new=20, use_cache=True)
    stepper.begin()
    stepper.step(torch.tensor([5]))
    assert stepper.room.keys[0].shape[2] == 5


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (causal(), None),
        (window(3, 0), 4),
        (causal() & window(7, 2), 8),
        (causal() & (window(3, 0) | window(5, 0)), 6),
        (causal() & (window(3, 0) | every(4)), None),
        (window(3, 0) & blocks(5), 4),
        (prefix(3) | causal(), None),
        (full(), None),
    ],
)
def test_how_far_back_a_mask_reaches(mask, wanted):
    assert lookback(mask) == wanted


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 5, 8, 9, 12, 13, 17, 24, 25, 33, 65, 200, 256)] == [
        *(1, 2, 4, 8, 8, 12, 12, 16, 24, 24, 32, 48, 96, 256, 256),
    ]


class PromptProgram:
    """Stands in for a program whose capture as a CUDA graph fails with an error."""

    device = torch.device("cpu")

    def __init__(self, *errors):
        self.errors = list(errors)

    def read(self, ids, *, last):
        if self.errors:
            raise self.errors.pop(0)
        return torch.zeros(len(ids), VOCAB), []


def test_prefill_out_of_memory_is_raised():
    prefill = fast.Reading(PromptProgram(torch.OutOfMemoryError("out of memory")), 1, 8)
    with pytest.raises(torch.OutOfMemoryError):
        prefill(torch.zeros(1, 3, dtype=torch.int64))


def test_prefill_that_cannot_be_captured_warns_and_runs_eagerly():
    prefill = fast.Reading(PromptProgram(RuntimeError("operation not permitted when stream is capturing")), 1, 8)
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing"):
        logits, _ = prefill(torch.zeros(1, 3, dtype=torch.int64))
    assert logits.shape == (1, VOCAB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefill(torch.zeros(1, 3, dtype=torch.int64))


def test_prefill_error_that_is_not_of_the_capture_is_raised_without_a_warning():
    prefill = fast.Reading(PromptProgram(RuntimeError("broken"), RuntimeError("broken")), 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="broken"):
            prefill(torch.zeros(1, 3, dtype=torch.int64))


def test_kernels_in_the_interpreter():
    """The Triton kernels of a step, run by Triton's interpreter on tiny shapes, against their references."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.generation.interpreted"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
