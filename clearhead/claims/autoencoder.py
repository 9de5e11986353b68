"""The latent space of a dense auto-encoder."""

from __future__ import annotations

import torch

from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import FINAL
from clearhead.models import Autoencoder, AutoencoderConfig


@claim(
    "latent-space",
    FINAL,
    "Part 1, Q5",
    "The latent space of a dense auto-encoder is lower-dimensional and captures the most salient features.",
    method="400 points of width 6 with two strong directions: a trained linear auto-encoder of 2 "
    "latents against the best possible "
    "(the two leading singular vectors); then one with more latents than inputs.",
    when="the latent space is narrower than the input; a wider one can copy its input and need not compress",
)
def latent_space(t: Trial) -> None:
    basis = torch.linalg.qr(torch.randn(6, 6, generator=t.generator)).Q
    x = torch.randn(400, 6, generator=t.generator) * torch.tensor([3.0, 2.0, 0.3, 0.2, 0.2, 0.1]) @ basis
    x = x - x.mean(0)
    values = torch.linalg.svdvals(x)
    best = (values[2:].square().sum() / x.numel()).item()
    errors = {}
    for d in (2, 9):
        torch.manual_seed(t.seed)
        model = Autoencoder(AutoencoderConfig(n_features=6, d_latent=d, bias=False))
        optimiser = torch.optim.LBFGS(model.parameters(), max_iter=400, line_search_fn="strong_wolfe")

        def closure(m: Autoencoder = model, o: torch.optim.Optimizer = optimiser) -> torch.Tensor:
            o.zero_grad()
            loss = (m(x) - x).square().mean()
            loss.backward()
            return loss

        optimiser.step(closure)
        errors[d] = (model(x) - x).square().mean().item()
    total = x.square().mean().item()
    t.case(
        "2 latents: error, and the best possible",
        f"{errors[2]:.5f} and {best:.5f} of {total:.3f}",
        errors[2] < 1.02 * best,
    )
    narrow = {d: d < x.shape[1] for d in errors}
    t.case(
        "9 latents for 6 inputs: is it lower-dimensional",
        f"no, and its error is {errors[9]:.1e}",
        narrow[9],
        inside=False,
    )
