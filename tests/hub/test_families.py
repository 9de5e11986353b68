"""Every family against its maker's own tiny random model: in, out, and everything that stands around a model."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch

from clearhead.analysis import trace
from clearhead.analysis.checks import Ids, check
from clearhead.analysis.cost import cost
from clearhead.generation import generate
from clearhead.hub import checkpoint, convert
from clearhead.hub.convert import detect_family, tensors
from clearhead.hub.family import canonical
from clearhead.masks import padding
from clearhead.models import Decoder, EncoderDecoder
from clearhead.nn import KVCache, MultiHeadAttention
from tests.support.third_party_models import PEERS, V


@pytest.fixture(scope="module", params=PEERS)
def peer(request):
    return PEERS[request.param]


@pytest.fixture(scope="module")
def built(peer, tmp_path_factory):
    """The maker's model, and the folder it wrote."""
    theirs, folder = peer.build(), tmp_path_factory.mktemp("theirs")
    peer.save(theirs, folder)
    return theirs, folder


@pytest.fixture
def saved(built):
    """The same to every test, whatever another has done to the model."""
    return deepcopy(built)


def assert_close(got, wanted, *, in_float32=False):
    """Equal up to rounding: some units in the last place of the largest number, in the dtype the maker computes in."""
    assert got.shape == wanted.shape
    unit = 100 * torch.finfo(torch.float32).eps if in_float32 else 3000 * torch.finfo(torch.float64).eps
    limit = unit * max(1.0, wanted.abs().max().item())
    worst = (got - wanted).abs().max().item()
    assert worst <= limit, f"differs by {worst:.3g}, allowed {limit:.3g}"


def test_outputs_and_gradients_are_theirs(peer, saved):
    theirs, folder = saved
    ours = checkpoint.load_third_party(folder)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float64}, "as it is stored"
    inputs = peer.example()
    got, wanted = peer.of_ours(ours)(*inputs), peer.run(theirs, *inputs)
    assert_close(got, wanted, in_float32=peer.in_float32)
    direction = torch.randn_like(wanted)
    (got * direction).sum().backward()
    (wanted * direction).sum().backward()
    # The table that brought the weights in brings the gradients out.
    with torch.no_grad():
        for weight in ours.parameters():
            assert weight.grad is not None
            weight.copy_(weight.grad)
    mine = tensors(ours, detect_family(checkpoint.open_checkpoint(folder)))
    expected = peer.gradients(theirs)
    expected["final_logits_bias"] = direction.sum((0, 1))[None] if wanted.dim() == 3 else direction  # by hand
    for base in ("bert.", "roberta.", "albert."):  # with a head, the rest has a name of its own
        expected = {name.removeprefix(base): gradient for name, gradient in expected.items()}
    expected = {name: expected[_spelling(name, expected)] for name in mine}
    assert len(mine) > 5
    for name, gradient in mine.items():
        assert_close(gradient, expected[name], in_float32=peer.in_float32)


def _spelling(name, expected):
    """transformers 5 has other names in memory than in the files it writes."""
    for old, new in {
        "embed_out": "lm_head",
        "dinov2.": "",  # of the model without a head
        "vit.encoder.layer.": "vit.layers.",
        "deit.encoder.layer.": "deit.layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }.items():
        if name not in expected:
            name = name.replace(old, new)
    return name


def test_what_comes_in_goes_out_to_the_same_bits(peer, saved, tmp_path):
    theirs, folder = saved
    ours = checkpoint.load_third_party(folder)
    convert.export_third_party(ours, tmp_path / "ours", family=detect_family(checkpoint.open_checkpoint(folder)).name)
    again = peer.reload(tmp_path / "ours")
    state, expected = peer.state(again), peer.state(theirs)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    inputs = peer.example()
    with torch.no_grad():
        assert_close(peer.run(again, *inputs), peer.run(theirs, *inputs), in_float32=peer.in_float32)
    assert canonical(checkpoint.load_third_party(tmp_path / "ours").config) == canonical(ours.config)


def test_padding_changes_nothing_for_the_others(peer, saved):
    theirs, folder = saved
    ours = checkpoint.load_third_party(folder)
    if not hasattr(ours.config, "vocab_size"):
        pytest.skip("reads pictures, all of one size, or texts up to their end")
    inputs = peer.example()
    lengths = [torch.tensor([ids.shape[1], 5]) for ids in inputs]
    real = tuple(torch.arange(ids.shape[1]) < n[:, None] for ids, n in zip(inputs, lengths, strict=True))
    names = ("mask",) if len(inputs) == 1 else ("source_mask", "target_mask")
    masks = dict(zip(names, map(padding, lengths), strict=True))
    if not peer.pads_source:
        del masks["source_mask"]
    with torch.no_grad():
        wanted = peer.padded(theirs, *inputs, real=real)
        got = peer.of_ours(ours)(*inputs, **masks)
    where = real[-1] if wanted.dim() == 3 else slice(None)  # one vector a text has no padding in it
    assert_close(got[where], wanted[where], in_float32=peer.in_float32)


def test_cached_decoding_is_uncached_decoding(peer, saved):
    ours = checkpoint.load_third_party(saved[1])
    if not isinstance(ours, (Decoder, EncoderDecoder)):
        pytest.skip("decodes nothing")
    (*source, ids), cache = peer.example(), KVCache()
    with torch.no_grad():
        whole = ours(*source, ids)
        step = partial(ours.decode, memory=ours.encode(*source)) if source else ours
        steps = torch.cat([step(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], dim=1)
    assert_close(steps, whole)


def test_generation_is_the_plain_loop(peer, saved):
    """Generation equals a loop that calls the model with all ids at every step."""
    ours = checkpoint.load_third_party(saved[1])
    if not isinstance(ours, (Decoder, EncoderDecoder)):
        pytest.skip("decodes nothing")
    *source, ids = (given[:1] for given in peer.example())
    begun, ids, score = ids[:, :5], ids[:, :5], torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for _ in range(4):
            best = ours(*source, ids)[:, -1].log_softmax(-1).max(-1)
            ids, score = torch.cat((ids, best.indices[:, None]), dim=1), score + best.values[0]
    how = {"decoder_start_ids": begun[0].tolist()} if source else {}
    found = generate(ours, *source or [begun], max_new_tokens=4, **how)
    assert found.ids[0, 0, -4:].tolist() == ids[0, -4:].tolist()
    assert_close(found.scores[0, 0], score, in_float32=True)


def test_check_finds_nothing(peer, saved):
    ours = checkpoint.load_third_party(saved[1])
    subject = peer.of_ours(ours)
    report = check(subject) if subject is ours else check(subject, inputs=Ids(V))
    assert report.ok, [str(finding) for finding in report.failures]


def test_look_sees_their_attention(peer, saved):
    theirs, folder = saved
    ours, inputs = checkpoint.load_third_party(folder), peer.example()
    with torch.no_grad():
        wanted = peer.weights(theirs, *inputs)
        with trace(ours) as seen:
            ours(*inputs)
    layers = {name for name, part in ours.named_modules() if isinstance(part, MultiHeadAttention)}
    assert {path.partition("@")[0] for path in wanted} == layers
    for name, weights in wanted.items():
        path, _, run = name.partition("@")
        assert_close(seen.weights(path, run=int(run or -1)), weights, in_float32=True)


def test_cost_counts_every_weight(peer, saved):
    theirs, folder = saved
    ours = checkpoint.load_third_party(folder)
    assert cost(ours.config, tokens=peer.tokens()).parameters.value == peer.n_weights(theirs)
