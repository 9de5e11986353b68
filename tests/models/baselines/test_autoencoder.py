"""Tests that compare the autoencoder with PCA, computed by a singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models.baselines.linear import Autoencoder, AutoencoderConfig
from clearhead.ops.activations import GELU, ReLU


def train(model, x, steps):
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=steps,
        tolerance_grad=1e-13,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    return (model(x) - x).square().mean().item()


def pca_error(x, rank):
    values = torch.linalg.svdvals(x - x.mean(0))
    return (values[rank:].square().sum() / x.numel()).item()


def low_rank(n, d, rank, noise=0.3):
    mixed = torch.randn(n, rank, dtype=torch.float64) @ torch.randn(rank, d, dtype=torch.float64)
    return mixed + noise * torch.randn(n, d, dtype=torch.float64) + torch.randn(d, dtype=torch.float64)


@pytest.mark.parametrize("d_latent", [2, 3, 5])
def test_trained_linear_autoencoder_reaches_loss_of_pca(d_latent):
    x = low_rank(101, 11, rank=3)
    model = Autoencoder(AutoencoderConfig(n_features=11, d_latent=d_latent)).double()
    best = pca_error(x, d_latent)
    error = train(model, x, 300)
    assert best * (1 - 1e-9) <= error <= best * 1.001


def test_latent_of_trained_linear_autoencoder_spans_principal_directions():
    x = low_rank(101, 7, rank=2)
    model = Autoencoder(AutoencoderConfig(n_features=7, d_latent=2)).double()
    train(model, x, 300)
    principal = torch.linalg.svd(x - x.mean(0))[2][:2]  # (2, 7)
    basis = torch.linalg.qr(model.decoder[0].weight.detach())[0]  # (7, 2)
    cosines = torch.linalg.svdvals(principal @ basis)  # of the angles between the two planes
    torch.testing.assert_close(cosines, torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0)


def test_hidden_layers_reconstruct_a_curve_better_than_pca():
    # Points on a parabola have one coordinate, which a network can find and a linear map cannot.
    t = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None]
    x = torch.cat((t, t.square(), 0.5 * t - t.square()), dim=1)
    model = Autoencoder(AutoencoderConfig(n_features=3, d_latent=1, hidden=(13,), activation=GELU())).double()
    assert train(model, x, 150) < 0.05 * pca_error(x, 1)


def test_forward_equals_decode_of_encode_and_written_out_layers():
    model = Autoencoder(AutoencoderConfig(n_features=11, d_latent=2, hidden=(7, 5), activation=ReLU())).double()
    x = torch.randn(3, 13, 11, dtype=torch.float64)
    latent = model.encode(x)
    assert latent.shape == (3, 13, 2)
    assert (latent < 0).any()  # no activation on the latent
    assert torch.equal(model(x), model.decode(latent))
    h = x
    for i, layer in enumerate((*model.encoder, *model.decoder)):
        h = h @ layer.weight.T + layer.bias
        h = h if i in (2, 5) else h.clamp(min=0)
    torch.testing.assert_close(model(x), h)


@pytest.mark.parametrize("bias", [True, False])
def test_parameter_count_equals_formula(bias):
    model = Autoencoder(AutoencoderConfig(n_features=11, d_latent=2, hidden=(7, 5), bias=bias))
    maps = 2 * (11 * 7 + 7 * 5 + 5 * 2)
    assert sum(p.numel() for p in model.parameters()) == maps + bias * (7 + 5 + 2 + 5 + 7 + 11)


def test_gradients_pass_gradcheck():
    model = Autoencoder(AutoencoderConfig(n_features=5, d_latent=2, hidden=(3,), activation=GELU())).double()
    assert torch.autograd.gradcheck(model, torch.randn(7, 5, dtype=torch.float64, requires_grad=True))


@pytest.mark.bad_input
def test_invalid_input_raises():
    model = Autoencoder(AutoencoderConfig(n_features=6, d_latent=2))
    with pytest.raises(ShapeError, match=r"got shape \(3, 5\), expected \(…, 6\): 6 features each; flatten images"):
        model(torch.randn(3, 5))
    with pytest.raises(ShapeError, match=r"got shape \(3, 6\), expected \(…, 2\): 2 latent values each"):
        model.decode(torch.randn(3, 6))
    with pytest.raises(DtypeError, match=r"got features of torch\.int64, expected floating point"):
        model(torch.ones(3, 6, dtype=torch.long))


@pytest.mark.bad_input
def test_invalid_configurations_raise_config_error():
    with pytest.raises(ConfigError, match="AutoencoderConfig: d_latent is 0; expected a whole number of at least 1"):
        AutoencoderConfig(n_features=3, d_latent=0)
    with pytest.raises(ConfigError, match=r"hidden is \(5, -1\); expected values, each a whole number of at least 1"):
        AutoencoderConfig(n_features=3, d_latent=1, hidden=(5, -1))
    with pytest.raises(ConfigError, match="activation"):
        AutoencoderConfig(n_features=3, d_latent=1, activation="relu")


def test_config_round_trips_through_dict_and_toml():
    config = AutoencoderConfig(n_features=11, d_latent=2, hidden=(7, 5), activation=GELU(tanh=True), bias=False)
    assert Config.from_toml(config.to_toml()) == config
    assert isinstance(config.build(), Autoencoder)


@pytest.mark.compiled
def test_compiled_full_graph_matches_eager():
    torch.compiler.reset()
    model, x = Autoencoder(AutoencoderConfig(n_features=11, d_latent=2, hidden=(7, 5))), torch.randn(3, 11)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
