"""Random configurations of every family, compared with their reference implementations in float64."""

from __future__ import annotations

import pytest
import torch

from clearhead.hub import checkpoint, convert
from clearhead.hub.convert import detect_family
from clearhead.hub.families import FAMILIES
from clearhead.hub.family import canonical
from clearhead.models import Decoder
from clearhead.nn import KVCache
from tests.support.odd_configurations import AXES, draw
from tests.support.reference_models import assert_close

SEEDS = range(3)


def test_every_family_has_odd_configurations():
    assert AXES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", AXES)
def test_odd_configuration_loads_and_exports(family, seed, tmp_path):
    peer = draw(family, seed)
    reference = peer.build()
    peer.save(reference, tmp_path / "model")
    model = checkpoint.load_third_party(tmp_path / "model")
    inputs = peer.example()
    with torch.no_grad():
        expected = peer.run(reference, *inputs)
        assert_close(peer.comparable(model)(*inputs), expected, in_float32=peer.in_float32)
        if isinstance(model, Decoder):
            (ids,), cache = inputs, KVCache()
            steps = [model(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])]
            assert_close(torch.cat(steps, dim=1), model(ids))
    name = detect_family(checkpoint.open_checkpoint(tmp_path / "model")).name
    assert name == family
    convert.export_third_party(model, tmp_path / "out", family=name)
    state, exported = peer.state(reference), peer.state(peer.reload(tmp_path / "out"))
    assert state.keys() == exported.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in state.items())
    assert canonical(checkpoint.load_third_party(tmp_path / "out").config) == canonical(model.config)
