"""Tests of the mixture of experts against its definition with loops, and of cost, check and walkthrough."""

from __future__ import annotations

import pytest
import torch

from clearhead.analysis import build_walkthrough
from clearhead.analysis.checks import check
from clearhead.analysis.cost import cost
from clearhead.errors import ConfigError
from clearhead.generation.engine.program import unsupported_reason
from clearhead.models import DecoderConfig
from clearhead.nn import DepthScaled, Experts, ExpertsFeedForward, FeedForward, SwiGLU

M, F, N = 6, 7, 5


def mixture(top_k: int) -> ExpertsFeedForward:
    torch.manual_seed(3)
    return ExpertsFeedForward(M, Experts(N, top_k), lambda: FeedForward(M, F, SwiGLU())).double()


def by_hand(layer: ExpertsFeedForward, x: torch.Tensor) -> torch.Tensor:
    """Token by token, as the paper writes it: a softmax over the scores of the experts that are kept."""
    rows = []
    for token in x.reshape(-1, M):
        scores = (layer.router.weight @ token).tolist()
        selected = sorted(range(N), key=lambda i: -scores[i])[: layer.top_k]
        powers = torch.stack([(layer.router.weight[i] @ token).exp() for i in selected])
        outputs = torch.stack([layer.experts[i](token) for i in selected])
        rows.append((powers / powers.sum()) @ outputs)
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("top_k", [1, 2, N])
def test_experts_and_gradients_equal_formula(top_k):
    layer, x = mixture(top_k), torch.randn(2, 11, M, dtype=torch.float64, requires_grad=True)
    got, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(got, expected)
    direction, weights = torch.randn_like(got), [x, *layer.parameters()]
    mine = torch.autograd.grad(got, weights, direction, materialize_grads=True)
    reference = torch.autograd.grad(expected, weights, direction, materialize_grads=True)
    torch.testing.assert_close(mine, reference)
    assert (mine[1].abs().sum() > 1e-9) == (top_k > 1), "a single expert's share is 1, whatever its score"


def test_unselected_expert_has_zero_gradient():
    layer = mixture(1)
    layer(torch.randn(1, M, dtype=torch.float64)).sum().backward()
    idle = [expert.down.weight.grad for expert in layer.experts]
    assert sum(bool(gradient.abs().sum() == 0) for gradient in idle) == N - 1


def test_experts_under_vmap_and_jvp_equal_plain_forward():
    """How many tokens an expert gets cannot be read there; the numbers are the same."""
    layer, x = mixture(2), torch.randn(3, 4, M, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    moved = (layer(x + 1e-6) - layer(x - 1e-6)) / 2e-6
    torch.testing.assert_close(tangent, moved, rtol=1e-6, atol=1e-6)


def config(experts: Experts | None, **more) -> DecoderConfig:
    sizes = {"vocab_size": 13, "d_model": M, "n_heads": 2, "n_layers": 2, "d_ff": F, "bias": False}
    return DecoderConfig(**sizes, activation=SwiGLU(), experts=experts, **more)


def test_cost_counts_selected_experts_per_token():
    """3 matrices of M × F for each of the experts that a token takes, and a router; all of them are parameters."""
    tokens, plain, mixed = 10, config(None), config(Experts(N, 2))  # 10 · 2 tokens divide among 5 experts
    dense_cost, mixture_cost = (cost(c, tokens=tokens) for c in (plain, mixed))
    layer = 2 * tokens * M * F * 3
    assert mixture_cost.total.forward.value - dense_cost.total.forward.value == 2 * (layer + 2 * tokens * M * N)
    assert mixture_cost.parameters.value == sum(w.numel() for w in mixed.build().parameters())
    assert mixture_cost.parameters.value - dense_cost.parameters.value == 2 * ((N - 1) * 3 * M * F + N * M)


def test_model_with_experts_round_trips_and_initializes():
    mixed = config(Experts(N, 2), init=DepthScaled())
    assert DecoderConfig.from_toml(mixed.to_toml()) == mixed
    model = mixed.build()
    assert model.blocks[0].feed_forward.experts[0].down.weight.std() < 0.02
    assert unsupported_reason(model) is None


def test_walkthrough_reports_combined_expert_output():
    result = build_walkthrough(config(Experts(N, 1)).build().eval(), torch.tensor([[3, 1, 4]]))
    outputs = [step for step in result.steps if step.branch == "feed-forward"]
    assert [(s.role, s.module) for s in outputs] == [("feed_forward", f"blocks.{i}.feed_forward") for i in (0, 1)]
    assert outputs[0].formula == "feed_forward(h) = Σ share · expert(h)"


def test_check_ignores_gradients_of_unselected_experts():
    assert check(config(Experts(16, 2)).build()).ok
    # The share of a single expert is always 1, so the router has no gradient and the check fails.
    (failure,) = check(config(Experts(3, 1)).build()).failures
    assert failure.property == "gradient flow"
    assert "blocks.0.feed_forward.router.weight, blocks.1.feed_forward.router.weight" in failure.location


@pytest.mark.bad_input
def test_experts_with_invalid_sizes_raise():
    with pytest.raises(ConfigError, match="top_k is 3 and n is 2"):
        Experts(2, 3)
    with pytest.raises(ConfigError, match="Experts: n is 0"):
        Experts(0)


@pytest.mark.compiled
def test_compiled_experts_with_graph_breaks_equal_eager():
    layer, x = mixture(2), torch.randn(7, M, dtype=torch.float64, requires_grad=True)
    got = torch.compile(layer, backend="eager")(x)
    torch.testing.assert_close(got, layer(x))
    got.square().sum().backward()
    mine, x.grad = x.grad, None
    layer(x).square().sum().backward()
    torch.testing.assert_close(mine, x.grad)
