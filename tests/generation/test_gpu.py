"""On a GPU: recorded steps and their kernels against the plain way, at float32, where ids can be compared exactly."""

from __future__ import annotations

import pytest
import torch

from clearhead.generation import Beam, Greedy, Sample, generate
from clearhead.models.presets import gpt2
from tests.generation import interpreted
from tests.generation.small import STOP
from tests.generation.test_fast import CASES, STRATEGIES, arguments, plain
from tests.generation.test_models import assert_equal

__all__ = ["plain"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what is tested is recorded there")


@pytest.mark.parametrize("how", STRATEGIES, ids=lambda how: type(how).__name__)
@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_recorded_steps_give_what_the_plain_way_gives(kind, name, build, how, plain):
    model, (rows, start) = build().double().cuda(), arguments(kind)
    options = {"how": how, "max_new": 13, "stop": STOP, "start": start}
    wanted = plain(lambda: generate(model, rows, **options))
    for _ in range(3):  # run, recorded, and taken up again
        assert_equal(generate(model, rows, **options), wanted)


def test_kernels():
    torch.set_default_device("cuda")
    try:
        with torch.no_grad():
            interpreted.products(), interpreted.attention(), interpreted.picking()
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize("how", [Greedy(), Sample(0.9, top_k=40, seed=3), Beam(4)], ids=lambda how: type(how).__name__)
@pytest.mark.parametrize("batch", [1, 9])
def test_a_model_of_real_size(how, batch, plain):
    """GPT-2's sizes in float32: all kernels of a step, at lengths that are cut into stretches."""
    torch.manual_seed(0)
    model = gpt2().replace(n_layers=3, vocab_size=5003).build().cuda()
    ids = torch.randint(5003, (batch, 37))
    options = {"how": how, "max_new": 120}
    found, wanted = generate(model, ids, **options), plain(lambda: generate(model, ids, **options))
    assert (found.ids == wanted.ids).float().mean() > 0.98  # two logits may tie within float32's error, once in a while


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "rotary", "none", "grouped-query"])
def test_prompts_of_one_length_are_read_by_a_recording(name, plain):
    (build,) = [build for kind, other, build in CASES if (kind, other) == ("continue", name)]
    model = build().double().cuda()
    for T in (5, 3, 5, 5, 16, 3):  # the same recording serves shorter ones
        ids = torch.randint(20, (2, T), generator=torch.Generator().manual_seed(T))
        wanted = plain(lambda ids=ids: generate(model, ids, max_new=4))
        assert_equal(generate(model, ids, max_new=4), wanted)
