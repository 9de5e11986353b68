"""The latent space of a dense auto-encoder."""

from __future__ import annotations

import torch

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.registry import FINAL, claim
from clearhead.models import Autoencoder, AutoencoderConfig


@claim(
    FINAL,
    "Part 1, Q5",
    statement=(
        "The latent space of a dense auto-encoder is lower-dimensional and aims to capture the most salient features."
    ),
    method=(
        "It is offered as the most accurate of four answers. 400 points of width 6 with two strong "
        "directions: a trained linear auto-encoder of 2 latents against the best possible (the two leading "
        "singular vectors), 3 draws."
    ),
)
def latent_space(t: Experiment) -> None:
    for draw in range(3):
        basis = torch.linalg.qr(torch.randn(6, 6, generator=t.generator)).Q
        x = torch.randn(400, 6, generator=t.generator) * torch.tensor([3.0, 2.0, 0.3, 0.2, 0.2, 0.1]) @ basis
        x = x - x.mean(0)
        best = (torch.linalg.svdvals(x)[2:].square().sum() / x.numel()).item()
        torch.manual_seed(t.seed + draw)
        error = trained(x, 2)
        case_name = f"draw {draw + 1}, 2 latents of 6: error, the best possible, and the data"
        t.record_case(case_name, f"{error:.5f}, {best:.5f}, {x.square().mean():.3f}", error < 1.02 * best)
    t.note(f"one of 9 latents for 6 inputs does not compress and copies them: error {trained(x, 9):.1e}")


def trained(x: torch.Tensor, d_latent: int) -> float:
    """Return the error of a linear auto-encoder trained to its minimum."""
    model = Autoencoder(AutoencoderConfig(n_features=x.shape[1], d_latent=d_latent, bias=False))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return closure().item()
