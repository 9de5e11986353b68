"""More prompts than slots: the ids of a prompt do not depend on slots, order or neighbors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from clearhead.errors import ConfigError
from clearhead.generation import BeamSearch, Greedy, LogitsError, LogitsProcessors, Sample, generate
from clearhead.generation.engine import slot_decoder
from tests.generation.cases import CASES
from tests.generation.small import STOP, VOCAB, decoder, encoder_decoder, prompts

LENGTHS = (5, 2, 11, 2, 1, 7, 9, 3, 3, 14, 1)
STRATEGIES = [Greedy(), Sample(1.2, top_k=11, top_p=0.95, min_p=0.01, seed=2), BeamSearch(3, length_penalty=0.6)]
NAMES = ["learned", "relative", "every", "ring-alibi", "layer-masks"]


def alone(model, rows, strategy, **options):
    """Return the ids of each prompt, generated one by one with the model's own forward."""
    if not isinstance(strategy, Sample):
        return [generate(model, row[None], strategy=strategy, engine="module", **options).sequence() for row in rows]
    # Samples depend on the index of the prompt, so the prompts before it are needed.
    return generate(model, rows, strategy=strategy, engine="module", **options).best


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("name", NAMES)
def test_more_prompts_than_slots_give_ids_of_each_prompt_alone(name, strategy, is_static):
    (build,) = [build for kind, case, build in CASES if (kind, case) == ("decoder", name)]
    model, rows = build(), prompts(VOCAB, LENGTHS)
    options = {"max_new_tokens": 9, "stop_ids": STOP}
    expected = alone(model, rows, strategy, **options)
    with slot_decoder.static_shapes() if is_static else nullcontext():
        for slots in (1, 4):
            result = generate(model, rows, strategy=strategy, slots=slots, **options)
            assert [x.tolist() for x in result.best] == [x.tolist() for x in expected]


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_more_sources_than_slots_give_ids_of_each_source_alone(strategy, is_static):
    model, rows = encoder_decoder(), prompts(19, LENGTHS)
    options = {"max_new_tokens": 9, "stop_ids": STOP, "decoder_start_ids": 4}
    expected = alone(model, rows, strategy, **options)
    with slot_decoder.static_shapes() if is_static else nullcontext():
        result = generate(model, rows, strategy=strategy, slots=3, **options)
    assert [x.tolist() for x in result.best] == [x.tolist() for x in expected]


def test_order_of_prompts_does_not_change_greedy_ids_in_float32():
    model, rows = decoder().float(), prompts(VOCAB, LENGTHS)
    forward = generate(model, rows, max_new_tokens=9, slots=4)
    backward = generate(model, rows[::-1], max_new_tokens=9, slots=2)
    assert torch.equal(forward.ids, backward.ids.flip(0))


def test_static_steps_use_few_batch_sizes():
    model, rows = decoder(), prompts(VOCAB, [1 + n % 7 for n in range(40)])
    with slot_decoder.static_shapes():
        for n in (40, 37, 33, 20, 19):
            generate(model, rows[:n], max_new_tokens=3 + n % 5, stop_ids=n % VOCAB, slots=32)
    (session,) = slot_decoder.compiled_decoder(model).sessions
    assert {key[-1] for key in session.graphs} <= {1, 2, 4, 8, 16, 24, 32}


def test_every_prompt_may_end_with_its_first_id():
    model, rows = decoder(), prompts(VOCAB, LENGTHS)
    result = generate(model, rows, max_new_tokens=1, slots=2)
    assert result.lengths.flatten().tolist() == [1] * len(rows)
    assert torch.equal(result.ids, generate(model, rows, max_new_tokens=1, engine="module").ids)


@pytest.mark.parametrize("is_static", [False, True], ids=["cpu", "static"])
def test_many_prompts_may_end_with_their_first_id_one_after_another(is_static):
    """More than Python's limit of nested calls."""
    rows = [[i % VOCAB] for i in range(1201)]
    with slot_decoder.static_shapes() if is_static else nullcontext():
        result = generate(decoder(), rows, max_new_tokens=1, slots=1)
    assert result.lengths.flatten().tolist() == [1] * len(rows)


def test_invalid_logits_name_the_prompt_and_leave_the_model_usable():
    model, rows = decoder(), prompts(VOCAB, LENGTHS)
    rows = [row.clamp(max=VOCAB - 2) for row in rows]
    expected = generate(model, rows, max_new_tokens=1, slots=2).ids
    rows[7][1] = VOCAB - 1
    with torch.no_grad():
        weight = model.embedding.weight[VOCAB - 1].clone()
        model.embedding.weight[VOCAB - 1] = torch.nan
        with pytest.raises(LogitsError):
            generate(model, rows, max_new_tokens=1, slots=2)
        model.embedding.weight[VOCAB - 1] = weight
    rows[7][1] = prompts(VOCAB, LENGTHS)[7][1].clamp(max=VOCAB - 2)
    assert torch.equal(generate(model, rows, max_new_tokens=1, slots=2).ids, expected)


@pytest.mark.bad_input
@pytest.mark.parametrize("slots", [0, -1, 2.5, "all", True])
def test_invalid_number_of_slots_raises(slots):
    with pytest.raises(ConfigError, match="slots"):
        generate(decoder(), [1, 2], slots=slots)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("name", ["learned", "ring"])
def test_logits_processors_give_ids_of_the_models_own_forward(name, strategy, is_static):
    (build,) = [build for kind, case, build in CASES if (kind, case) == ("decoder", name)]
    model, rows = build(), prompts(VOCAB, LENGTHS)
    processors = LogitsProcessors(no_repeat_ngram_size=2, repetition_penalty=1.3)
    options = {"strategy": strategy, "max_new_tokens": 9, "stop_ids": STOP, "logits_processors": processors}
    expected = generate(model, rows, engine="module", **options)
    with slot_decoder.static_shapes() if is_static else nullcontext():
        assert torch.equal(generate(model, rows, **options).ids, expected.ids)
