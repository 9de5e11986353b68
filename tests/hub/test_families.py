"""Every family, compared with tiny random models of its reference implementation: loading, export and tools."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch

from clearhead.analysis import trace
from clearhead.analysis.checks import Ids, check
from clearhead.analysis.cost import cost
from clearhead.generation import BeamSearch, Greedy, generate
from clearhead.generation.engine.program import unsupported_reason
from clearhead.hub import checkpoint, convert
from clearhead.hub.convert import detect_family, tensors
from clearhead.hub.family import canonical
from clearhead.masks import padding
from clearhead.models import Decoder, EncoderDecoder
from clearhead.nn import KVCache, MultiHeadAttention
from tests.support.reference_models import V, assert_close
from tests.support.third_party_models import PEERS


@pytest.fixture(scope="module", params=PEERS)
def peer(request):
    return PEERS[request.param]


@pytest.fixture(scope="module")
def built(peer, tmp_path_factory):
    """The reference model, and the folder that it was saved to."""
    reference = peer.build()
    folder = tmp_path_factory.mktemp("reference")
    peer.save(reference, folder)
    return reference, folder


@pytest.fixture
def saved(built):
    """A copy for each test, because some tests change the model."""
    return deepcopy(built)


def test_loaded_model_has_the_outputs_and_gradients_of_the_reference(peer, saved):
    reference, folder = saved
    model = checkpoint.load_third_party(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}, "the stored dtype"
    inputs = peer.example()
    output, expected_output = peer.comparable(model)(*inputs), peer.run(reference, *inputs)
    assert_close(output, expected_output, in_float32=peer.in_float32)
    direction = torch.randn_like(expected_output)
    (output * direction).sum().backward()
    (expected_output * direction).sum().backward()
    # The weight maps that loaded the parameters export the gradients.
    with torch.no_grad():
        for weight in model.parameters():
            assert (weight.grad is not None) == weight.requires_grad
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    family = detect_family(checkpoint.open_checkpoint(folder))
    actual = tensors(model, family)
    expected = peer.gradients(reference)
    expected["final_logits_bias"] = direction.sum((0, 1))[None] if expected_output.dim() == 3 else direction
    names = family.normalize_names(expected, model.config)
    expected = {name: expected[names.get(name) or _name_in_memory(name, expected)] for name in actual}
    assert len(actual) > 5
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], in_float32=peer.in_float32)


def _name_in_memory(name, expected):
    """Return the name in memory of a stored tensor; in transformers 5 they differ."""
    for old, new in {
        "embed_out": "lm_head",
        "dinov2.": "",  # absent without a head
        "vit.encoder.layer.": "vit.layers.",
        "deit.encoder.layer.": "deit.layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "vit.": "",  # absent without a head
    }.items():
        if name not in expected:
            name = name.replace(old, new)
    return name


def test_exported_model_is_bit_equal_to_the_reference(peer, saved, tmp_path):
    reference, folder = saved
    model = checkpoint.load_third_party(folder)
    convert.export_third_party(model, tmp_path / "out", family=detect_family(checkpoint.open_checkpoint(folder)).name)
    reloaded = peer.reload(tmp_path / "out")
    state, expected = peer.state(reloaded), peer.state(reference)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    inputs = peer.example()
    with torch.no_grad():
        assert_close(peer.run(reloaded, *inputs), peer.run(reference, *inputs), in_float32=peer.in_float32)
    assert canonical(checkpoint.load_third_party(tmp_path / "out").config) == canonical(model.config)


def test_padded_batch_matches_the_reference(peer, saved):
    reference, folder = saved
    model = checkpoint.load_third_party(folder)
    if not hasattr(model.config, "vocab_size"):
        pytest.skip("takes images of one size, audio, or texts that end with an id")
    inputs = peer.example()
    lengths = [torch.tensor([ids.shape[1], 5]) for ids in inputs]
    is_token = tuple(torch.arange(ids.shape[1]) < n[:, None] for ids, n in zip(inputs, lengths, strict=True))
    names = ("mask",) if len(inputs) == 1 else ("source_mask", "target_mask")
    masks = dict(zip(names, map(padding, lengths), strict=True))
    if not peer.pads_source:
        del masks["source_mask"]
    with torch.no_grad():
        expected = peer.padded(reference, *inputs, is_token=is_token)
        actual = peer.comparable(model)(*inputs, **masks)
    index = is_token[-1] if expected.dim() == 3 else slice(None)  # a pooled vector contains no padding
    assert_close(actual[index], expected[index], in_float32=peer.in_float32)


def test_cached_decoding_equals_uncached_decoding(peer, saved):
    model = checkpoint.load_third_party(saved[1])
    if not isinstance(model, (Decoder, EncoderDecoder)):
        pytest.skip("not a decoder")
    (*source, ids), cache = peer.example(), KVCache()
    with torch.no_grad():
        expected = model(*source, ids)
        step = partial(model.decode, memory=model.encode(*source)) if source else model
        steps = torch.cat([step(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], dim=1)
    assert_close(steps, expected)


def test_generation_equals_uncached_loop(peer, saved):
    """Generation equals a loop that calls the model with all ids at every step."""
    model = checkpoint.load_third_party(saved[1])
    if not isinstance(model, (Decoder, EncoderDecoder)) or not model.config.lm_head:
        pytest.skip("not a language model")
    *source, ids = (example[:1] for example in peer.example())
    start, ids, score = ids[:, :5], ids[:, :5], torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for _ in range(4):
            best = model(*source, ids)[:, -1].log_softmax(-1).max(-1)
            ids, score = torch.cat((ids, best.indices[:, None]), dim=1), score + best.values[0]
    options = {"decoder_start_ids": start[0].tolist()} if source else {}
    generated = generate(model, *source or [start], max_new_tokens=4, **options)
    assert generated.ids[0, 0, -4:].tolist() == ids[0, -4:].tolist()
    assert_close(generated.scores[0, 0], score, in_float32=True)


_DEPENDS_ON_LENGTH = "its rotary positions depend on the length of the sequence"
# Models whose own forward decodes.
NOT_IN_ENGINE = {
    "LlamaForCausalLM": _DEPENDS_ON_LENGTH,  # dynamic NTK scaling
    "Phi3ForCausalLM": _DEPENDS_ON_LENGTH,  # LongRoPE
}


def test_engine_equals_the_forward_of_the_model(peer, saved):
    """The fused engine decodes as the model's own forward, or its reason is one of these known ones."""
    model = checkpoint.load_third_party(saved[1])
    if not isinstance(model, (Decoder, EncoderDecoder)) or not model.config.lm_head:
        pytest.skip("not a language model")
    if (reason := unsupported_reason(model)) is not None:
        assert reason == NOT_IN_ENGINE[peer.model]
        pytest.skip(reason)
    *source, ids = (example[:1] for example in peer.example())
    options = {"decoder_start_ids": ids[0, :3].tolist()} if source else {}
    prompts = source or [ids[:, :3]]
    for strategy in (Greedy(), BeamSearch(2)):
        fused, module = (
            generate(model, *prompts, max_new_tokens=7, strategy=strategy, engine=engine, **options)
            for engine in ("fused", "module")
        )
        assert torch.equal(fused.ids, module.ids)
        assert_close(fused.scores, module.scores, in_float32=True)


def test_check_reports_no_failures(peer, saved):
    model = checkpoint.load_third_party(saved[1])
    subject = peer.comparable(model)
    report = check(subject) if subject is model else check(subject, inputs=Ids(V))
    assert report.ok, [str(finding) for finding in report.failures]


def test_trace_records_the_attention_weights_of_the_reference(peer, saved):
    reference, folder = saved
    model, inputs = checkpoint.load_third_party(folder), peer.example()
    with torch.no_grad():
        expected = peer.weights(reference, *inputs)
        with trace(model) as t:
            model(*inputs)
    layers = {name for name, part in model.named_modules() if isinstance(part, MultiHeadAttention)}
    assert {path.partition("@")[0] for path in expected} == layers
    for name, weights in expected.items():
        path, _, run = name.partition("@")
        assert_close(t.weights(path, run=int(run or -1)), weights, in_float32=True)


def test_cost_counts_every_parameter(peer, saved):
    reference, folder = saved
    model = checkpoint.load_third_party(folder)
    assert cost(model.config, tokens=peer.tokens()).parameters.value == peer.n_parameters(reference)
