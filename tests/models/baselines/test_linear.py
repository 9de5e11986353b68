"""Tests that compare logistic regression with scikit-learn, the exam's update rule and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.linear_model import LogisticRegression as Peer

from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models.baselines.linear import (
    LogisticRegression,
    LogisticRegressionConfig,
    Ridge,
    SquaredInfinity,
    logistic_loss,
)


def fit(model, x, classes, penalty):
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        loss = logistic_loss(model, x, classes, penalty)
        loss.backward()
        return loss

    optimiser.step(closure)
    return model


def data(n, d, n_classes):
    x = torch.randn(n, d, dtype=torch.float64)
    classes = (x @ torch.randn(d, n_classes, dtype=torch.float64) + torch.randn(n, n_classes)).argmax(-1)
    assert set(classes.tolist()) == set(range(n_classes))
    return x, classes


@pytest.mark.parametrize("n_classes", [2, 3, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_ridge_optimum_matches_scikit_learn(n_classes, bias):
    n, d, strength = 83, 7, 0.03
    x, classes = data(n, d, n_classes)
    config = LogisticRegressionConfig(n_features=d, n_classes=n_classes, bias=bias)
    model = fit(LogisticRegression(config).double(), x, classes, Ridge(strength))
    peer = Peer(C=1 / (strength * n), fit_intercept=bias, tol=1e-10, max_iter=5000).fit(x.numpy(), classes.numpy())
    np.testing.assert_allclose(model.linear.weight.detach().numpy(), peer.coef_, atol=2e-5)
    np.testing.assert_allclose(model(x).softmax(-1).detach().numpy(), peer.predict_proba(x.numpy()), atol=1e-5)


def test_subgradient_descent_reaches_squared_infinity_norm_optimum():
    """Against a smooth form of the same problem: least loss(w) + λ/2 t² with −t ≤ w ≤ t, by scipy."""
    x, classes = data(83, 5, 2)
    strength, signs, features = 3.0, 2 * classes.numpy() - 1, x.numpy()

    def smooth(wt):
        return np.logaddexp(0, -signs * (features @ wt[:-1])).mean() + strength / 2 * wt[-1] ** 2

    limits = [{"type": "ineq", "fun": lambda wt, s=s: wt[-1] + s * wt[:-1]} for s in (1, -1)]
    best = scipy.optimize.minimize(smooth, np.ones(6), method="SLSQP", constraints=limits, tol=1e-12)
    assert best.success
    at_limit = np.abs(best.x[:-1]) > 0.999 * best.x[-1]
    assert at_limit.sum() >= 2  # several weights share the maximum at the optimum, which makes it hard to find
    model = LogisticRegression(LogisticRegressionConfig(n_features=5, bias=False)).double()
    weight, lowest = model.linear.weight, torch.inf
    for step in range(1000):
        loss = logistic_loss(model, x, classes, SquaredInfinity(strength))
        lowest = min(lowest, loss.item())
        with torch.no_grad():
            weight -= 2.0 / (step + 3) * torch.autograd.grad(loss, weight)[0]
    assert best.fun - 1e-9 <= lowest <= best.fun + 1e-4
    weight.data.copy_(torch.from_numpy(best.x[None, :-1]))
    assert logistic_loss(model, x, classes, SquaredInfinity(strength)).item() == pytest.approx(best.fun, abs=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n_classes", "rows"), [(2, 1), (3, 3), (7, 7)])
def test_parameter_count_equals_formula(n_classes, rows, bias):
    model = LogisticRegression(LogisticRegressionConfig(n_features=13, n_classes=n_classes, bias=bias))
    assert sum(p.numel() for p in model.parameters()) == rows * (13 + bias)
    assert torch.equal(model(torch.randn(5, 13)).softmax(-1), torch.full((5, n_classes), 1 / n_classes))


def test_softmax_of_two_classes_equals_sigmoid():
    model = LogisticRegression(LogisticRegressionConfig(n_features=5)).double()
    torch.nn.init.normal_(model.linear.weight)
    torch.nn.init.normal_(model.linear.bias)
    x = torch.randn(7, 5, dtype=torch.float64)
    z = x @ model.linear.weight[0] + model.linear.bias
    torch.testing.assert_close(model(x).softmax(-1), torch.stack((1 - z.sigmoid(), z.sigmoid()), -1))
    # L(w) = Σ log(1 + e^{−z}) over the positive + Σ log(1 + e^{z}) over the negative examples, here its mean
    y = torch.tensor([1, 0, 0, 1, 1, 0, 1])
    by_hand = torch.where(y == 1, (1 + (-z).exp()).log(), (1 + z.exp()).log()).mean()
    torch.testing.assert_close(logistic_loss(model, x, y), by_hand)


def test_penalties_match_hand_computed_values():
    model = LogisticRegression(LogisticRegressionConfig(n_features=3)).double()
    model.linear.weight.data = torch.tensor([[1.0, -4.0, 2.0]], dtype=torch.float64)
    model.linear.bias.data.fill_(100.0)  # not penalised
    assert Ridge(0.5)(model).item() == 0.25 * (1 + 16 + 4)
    assert SquaredInfinity(0.5)(model).item() == 0.25 * 16
    matrix = LogisticRegression(LogisticRegressionConfig(n_features=2, n_classes=3)).double()
    matrix.linear.weight.data = torch.tensor([[1.0, 2.0], [3.0, -5.0], [4.0, 0.0]], dtype=torch.float64)
    assert SquaredInfinity(2.0)(matrix).item() == 25.0


@pytest.mark.parametrize(
    "w",
    [
        [0.3, -1.7, 0.5, 1.1],  # the largest |w| is negative
        [2.0, -0.1, 0.0, 1.9],
        [0.5, -1.5, 1.5, 1.5],  # a tie of opposite signs: argmax is the first
        [0.0, 0.0, 0.0, 0.0],
    ],
)
@pytest.mark.parametrize("label", [0, 1])
def test_gradient_step_matches_exam_update_rule(w, label):
    """w ← w − η((P(y=1|x) − y) x + λ w ⊙ e_argmax|w|), with the bias as a feature that is 1."""
    rate, strength = 0.3, 0.7
    model = LogisticRegression(LogisticRegressionConfig(n_features=4, bias=False)).double()
    w = torch.tensor(w, dtype=torch.float64)
    x = torch.tensor([1.0, 0.4, -2.0, 0.9], dtype=torch.float64)
    model.linear.weight.data.copy_(w[None])
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    logistic_loss(model, x[None], torch.tensor([label]), SquaredInfinity(strength)).backward()
    optimiser.step()
    k = max(range(4), key=lambda i: abs(w[i]))  # Python's max also keeps the first
    one_hot = torch.eye(4, dtype=torch.float64)[k]
    probability = 1 / (1 + torch.exp(-w @ x))
    expected = w - rate * ((probability - label) * x + strength * w * one_hot)
    torch.testing.assert_close(model.linear.weight[0].detach(), expected)


def test_gradient_at_tied_maximum_is_a_subgradient():
    """A subgradient g of f at w lies under f everywhere: f(v) ≥ f(w) + g·(v − w)."""
    model = LogisticRegression(LogisticRegressionConfig(n_features=3, bias=False)).double()
    weight, penalty = model.linear.weight, SquaredInfinity(1.3)
    w = torch.tensor([[1.5, -1.5, 1.5]], dtype=torch.float64)
    weight.data.copy_(w)
    at_w = penalty(model)
    (g,) = torch.autograd.grad(at_w, weight)
    assert (g != 0).sum() == 1
    for _ in range(200):
        v = w + torch.randn_like(w)
        weight.data.copy_(v)
        assert penalty(model) >= at_w + (g * (v - w)).sum() - 1e-12


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("penalty", [None, Ridge(0.3), SquaredInfinity(0.3)])
def test_gradients_pass_gradcheck(n_classes, penalty):
    model = LogisticRegression(LogisticRegressionConfig(n_features=5, n_classes=n_classes)).double()
    torch.nn.init.normal_(model.linear.weight)
    x, classes = torch.randn(7, 5, dtype=torch.float64), torch.randint(n_classes, (7,))

    def loss(weight, bias):
        swapped = {"model.linear.weight": weight, "model.linear.bias": bias}
        return torch.func.functional_call(_Loss(model, penalty), swapped, (x, classes))

    weight = model.linear.weight.detach().clone().requires_grad_()
    bias = torch.randn_like(model.linear.bias).requires_grad_()
    assert torch.autograd.gradcheck(loss, (weight, bias))


class _Loss(torch.nn.Module):
    def __init__(self, model, penalty):
        super().__init__()
        self.model, self.penalty = model, penalty

    def forward(self, x, classes):
        return logistic_loss(self.model, x, classes, self.penalty)


@pytest.mark.bad_input
def test_invalid_input_raises():
    model = LogisticRegression(LogisticRegressionConfig(n_features=6))
    with pytest.raises(ShapeError, match=r"shape \(3, 2, 3\), expected \(examples, 6\); flatten images"):
        model(torch.randn(3, 2, 3))
    with pytest.raises(ShapeError, match=r"shape \(3, 5\)"):
        model(torch.randn(3, 5))
    with pytest.raises(DtypeError, match=r"torch\.int64, expected floating point"):
        model(torch.ones(3, 6, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"got \(2,\) classes for 3 examples"):
        logistic_loss(model, torch.randn(3, 6), torch.tensor([0, 1]))
    with pytest.raises(DtypeError, match=r"classes\.long\(\)"):
        logistic_loss(model, torch.randn(3, 6), torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.bad_input
def test_invalid_configurations_raise_config_error():
    with pytest.raises(ConfigError, match="n_classes is 1; expected a whole number of at least 2"):
        LogisticRegressionConfig(n_features=3, n_classes=1)
    with pytest.raises(ConfigError, match="n_features is 0; expected a whole number"):
        LogisticRegressionConfig(n_features=0)
    with pytest.raises(ConfigError, match="Ridge: strength is -1; expected a number of at least 0"):
        Ridge(-1)
    with pytest.raises(ConfigError, match="SquaredInfinity: strength is nan; expected a number of at least 0"):
        SquaredInfinity(float("nan"))


def test_config_round_trips_through_dict_and_toml():
    config = LogisticRegressionConfig(n_features=13, n_classes=5, bias=False)
    assert Config.from_toml(config.to_toml()) == config
    assert isinstance(config.build(), LogisticRegression)


@pytest.mark.compiled
@pytest.mark.parametrize("penalty", [Ridge(0.3), SquaredInfinity(0.3)])
def test_compiled_model_and_loss_match_eager(penalty):
    torch.compiler.reset()
    model = LogisticRegression(LogisticRegressionConfig(n_features=5, n_classes=3))
    torch.nn.init.normal_(model.linear.weight)
    x, classes = torch.randn(7, 5), torch.randint(3, (7,))
    compiled = torch.compile(logistic_loss, fullgraph=True, backend="aot_eager")
    losses = [loss(model, x, classes, penalty) for loss in (logistic_loss, compiled)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*[torch.autograd.grad(loss, list(model.parameters())) for loss in losses])
