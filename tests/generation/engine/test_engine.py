"""The engine gives the same ids, log-probabilities and scores as the module decoder.

On the CPU the engine reads the used indices only. The `static_shapes` fixture runs the steps of fixed shapes that
a GPU captures, without capturing them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.generation import BeamSearch, generate, stream
from clearhead.generation.decoder import size_bucket
from clearhead.generation.engine import slot_decoder
from clearhead.generation.engine.slot_decoder import SlotDecoder, compiled_decoder
from clearhead.generation.model_decoders import incremental_decoder
from clearhead.generation.request import SearchRequest
from clearhead.masks import blocks, causal, every, full, lookback, prefix, window
from clearhead.nn.positions import Rotary
from tests.generation.cases import CASES, STRATEGIES, arguments, assert_equal
from tests.generation.small import STOP, VOCAB, decoder, encoder_decoder, prompts

MAX_NEW_TOKENS = 13


@pytest.fixture
def static_shapes():
    with slot_decoder.static_shapes():
        yield


@functools.cache
def module_result(name, strategy):
    """Return the result of the module decoder for a case."""
    kind, build = next((kind, build) for kind, case, build in CASES if f"{kind} {case}" == name)
    rows, start = arguments(kind)
    options = {"strategy": strategy, "max_new_tokens": MAX_NEW_TOKENS, "stop_ids": STOP, "decoder_start_ids": start}
    return generate(build(), rows, engine="module", **options)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_fused_decoder_equals_module_decoder(kind, name, build, strategy):
    model, (rows, start) = build(), arguments(kind)
    options = {"strategy": strategy, "max_new_tokens": MAX_NEW_TOKENS, "stop_ids": STOP, "decoder_start_ids": start}
    assert_equal(generate(model, rows, **options), module_result(f"{kind} {name}", strategy))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.usefixtures("static_shapes")
def test_static_shapes_equal_module_decoder(kind, name, build, strategy):
    model, (rows, start) = build(), arguments(kind)
    options = {"strategy": strategy, "max_new_tokens": MAX_NEW_TOKENS, "stop_ids": STOP, "decoder_start_ids": start}
    assert_equal(generate(model, rows, **options), module_result(f"{kind} {name}", strategy))
    again = generate(model, rows[::-1], **options)  # reuses the buffers of the first call
    assert_equal(again, generate(model, rows[::-1], engine="module", **options))


def test_prompt_finished_at_first_step_does_not_change_other_prompts():
    model, rows = decoder(), prompts(VOCAB)
    for stop in range(VOCAB):  # for some stop ids, some prompts finish at the first id
        options = {"strategy": BeamSearch(3, length_penalty=0.0), "max_new_tokens": 4, "stop_ids": stop}
        assert_equal(generate(model, rows, **options), generate(model, rows, **options, use_cache=False))


@pytest.mark.usefixtures("static_shapes")
def test_interleaved_streams_of_one_model_are_independent():
    model = decoder()
    first, second = [3, 1, 4], [1, 5, 9]
    alone = [[int(step.ids[0]) for step in stream(model, row, max_new_tokens=30)] for row in (first, second)]
    pairs = list(zip(stream(model, first, max_new_tokens=30), stream(model, second, max_new_tokens=30), strict=True))
    assert [[int(step.ids[0]) for step in steps] for steps in zip(*pairs, strict=True)] == alone


@pytest.mark.usefixtures("static_shapes")
def test_closed_stream_releases_its_graph():
    model = decoder()
    whole = generate(model, [3, 1, 4], max_new_tokens=30).ids[0, 0].tolist()
    steps = stream(model, [3, 1, 4], max_new_tokens=30)
    assert int(next(steps).ids[0]) == whole[0]
    steps.close()
    assert [int(step.ids[0]) for step in stream(model, [3, 1, 4], max_new_tokens=30)] == whole


def test_changed_parameters_recompile_program():
    model = decoder()
    rows = prompts(VOCAB)
    first = generate(model, rows, max_new_tokens=9)
    program = compiled_decoder(model).program
    with torch.no_grad():
        model.blocks[0].attention.k_proj.weight.neg_()
    assert compiled_decoder(model).program is not program
    second = generate(model, rows, max_new_tokens=9)
    assert not torch.allclose(first.log_probs, second.log_probs)
    assert_equal(second, generate(model, rows, max_new_tokens=9, engine="module"))


def is_fused(model, rows=((1, 2),), decoder_start_ids=None):
    request = SearchRequest.of(None, 5, None, decoder_start_ids=decoder_start_ids)
    decoder = incremental_decoder(model, [list(row) for row in rows], request)
    return isinstance(decoder, SlotDecoder)


def test_models_with_hooks_or_replaced_modules_use_module_decoder():
    model = decoder()
    assert is_fused(model)
    handle = model.blocks[1].register_forward_hook(lambda *_: None)
    assert not is_fused(model)
    handle.remove()
    assert is_fused(model)
    model.blocks[0].attention.impl = "reference"
    assert not is_fused(model)
    model = decoder()
    model.blocks[0].feed_forward.up = torch.nn.Sequential(model.blocks[0].feed_forward.up)
    assert not is_fused(model)
    pair = encoder_decoder()
    assert is_fused(pair, decoder_start_ids=4)
    pair.encoder.blocks[0].register_forward_pre_hook(lambda *_: None)
    assert not is_fused(pair, decoder_start_ids=4)


def test_cache_of_window_mask_has_window_size():
    model = decoder(mask=causal() & window(4, 0), positions=Rotary())
    fused = incremental_decoder(model, [[3, 1, 4, 1, 5, 9, 2, 6]], SearchRequest.of(None, 20, None))
    fused.prefill()
    fused.decode_step(torch.tensor([5]))
    assert fused.cache.keys[0].shape[2] == 5


@pytest.mark.parametrize(
    ("mask", "expected"),
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
def test_reach_returns_lookback_of_mask(mask, expected):
    assert lookback(mask) == expected


def test_size_bucket_rounds_up_to_captured_sizes():
    assert [size_bucket(n) for n in (1, 2, 3, 5, 8, 9, 12, 13, 17, 24, 25, 33, 65, 200, 256)] == [
        *(1, 2, 4, 8, 8, 12, 12, 16, 24, 24, 32, 48, 96, 256, 256),
    ]


def test_decode_kernels_equal_references_in_triton_interpreter():
    """The Triton kernels of a step, run by Triton's interpreter on tiny shapes, against their references."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.generation.interpreted"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
