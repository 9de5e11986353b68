"""The engine has an entry for every module class and configuration field, so that no model is slow in silence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from clearhead.errors import ConfigError
from clearhead.generation import Sample, generate, warm_up
from clearhead.generation.engine import slot_decoder
from clearhead.generation.engine.program import CONFIG_FIELDS, MODULES, unsupported_reason
from clearhead.models.decoder import DecoderConfig
from clearhead.nn.modes import iter_modules
from tests.generation.cases import CASES
from tests.generation.small import VOCAB, decoder, encoder_decoder, prompts

# Fields whose models run their own forward.
NOT_IMPLEMENTED = {"lm_head"}


def test_every_field_of_a_decoder_has_an_entry():
    assert {field.name for field in dataclasses.fields(DecoderConfig)} == CONFIG_FIELDS | NOT_IMPLEMENTED


@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_decoder_is_supported(kind, name, build):
    model = build()
    assert unsupported_reason(model) is None
    assert {type(module) for module in iter_modules(getattr(model, "decoder", model))} <= set(MODULES)


def test_field_without_entry_is_not_supported():
    assert unsupported_reason(decoder(lm_head=False)) == "lm_head is not implemented"


def test_unknown_module_is_not_supported():
    model = decoder()
    model.norm = nn.GroupNorm(3, 12)
    assert unsupported_reason(model) == "a GroupNorm was replaced or patched"


class IdentityRotation:
    """A rotation of another class than `Rotary`, whose angles the engine cannot tabulate."""

    def rotate(self, x, positions):
        return x


def test_unknown_rotation_generates_by_its_modules():
    model = decoder()
    expected = generate(model, prompts(VOCAB), max_new_tokens=3).ids
    for block in model.blocks:
        block.attention.rotary = IdentityRotation()
    assert unsupported_reason(model) == "an attention layer has IdentityRotation positions"
    assert torch.equal(generate(model, prompts(VOCAB), max_new_tokens=3).ids, expected)


@pytest.mark.parametrize("strategy", [None, Sample(0.7, top_k=3)], ids=["greedy", "sample"])
def test_warm_up_runs_every_batch_size(strategy):
    for model, start in ((decoder(), None), (encoder_decoder(), 4)):
        with slot_decoder.static_shapes():
            warm_up(model, max_tokens=20, slots=9, strategy=strategy, decoder_start_ids=start)
        (session,) = slot_decoder.compiled_decoder(getattr(model, "decoder", model)).sessions
        assert {key[-1] for key in session.graphs} == {1, 2, 4, 8, 16}


class FullMemory(slot_decoder.StaticKVCache):
    """A cache on a device whose memory suffices for two slots."""

    def __init__(self, program, shape, *, is_static):
        if shape.n_slots > 2:
            raise torch.OutOfMemoryError("out of memory")
        super().__init__(program, shape, is_static=is_static)


@pytest.mark.parametrize("slots", ["auto", 8])
def test_out_of_memory_uses_fewer_slots_or_raises(monkeypatch, slots):
    model, rows = decoder(), prompts(VOCAB, (3, 1, 4, 1, 5, 9, 2, 6))
    expected = generate(model, rows, max_new_tokens=5)
    monkeypatch.setattr(slot_decoder, "StaticKVCache", FullMemory)
    if slots == "auto":
        assert torch.equal(generate(model, rows, max_new_tokens=5).ids, expected.ids)
    else:
        with pytest.raises(ConfigError, match="8 slots of 14 tokens do not fit into memory; give slots="):
            generate(model, rows, max_new_tokens=5, slots=slots)
    monkeypatch.undo()
    assert torch.equal(generate(model, rows, max_new_tokens=5).ids, expected.ids)
