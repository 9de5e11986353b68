"""Parallel training, sequential generation, and decoders without a causal mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.numerics import fit, max_abs_diff
from clearhead.course.claims.registry import EXAM, FINAL, HOMEWORK, claim
from clearhead.masks import causal, full
from clearhead.models import DecoderConfig
from clearhead.nn.positions import LearnedPositions

SMALL = DecoderConfig(vocab_size=5, d_model=16, n_heads=2, d_ff=32, n_layers=1)


def _config(n: int, **choices: object) -> DecoderConfig:
    """Return the configuration of a small decoder for n tokens."""
    return SMALL.replace(max_len=n, positions=LearnedPositions(max_len=n), **choices)


@claim(
    FINAL,
    "Part 1, Q7 (marked as true)",
    statement="In training, a decoder's forward pass over a sequence can be done for all positions at once.",
    method="Logits of one pass over 9 tokens against 9 passes over growing prefixes.",
)
def training_parallel(t: Experiment) -> None:
    model = _config(16, n_layers=2).build().double().eval()
    ids = torch.randint(0, 5, (3, 9), generator=t.generator)
    steps = torch.stack([model(ids[:, : i + 1])[:, -1] for i in range(9)], 1)
    t.assert_below("one pass against nine", max_abs_diff(model(ids), steps), 1e-12, "largest difference {:.1e}")


def second_token_spread() -> float:
    """Return how much the logits of the second generated token depend on the first."""
    model = _config(16, n_layers=1).build().double().eval()
    logits = model(torch.tensor([[0, first] for first in range(5)]))[:, -1]
    return max_abs_diff(logits, logits[:1])


@claim(
    FINAL,
    "Part 1, Q7 (option not marked as true)",
    statement="At test time a decoder's pass over a sequence cannot be done for all positions at once.",
    method="Do the logits of the second generated token depend on which token was chosen first?",
)
def generation_sequential(t: Experiment) -> None:
    case_name = "logits of the second token, over the choices of the first"
    t.assert_above(case_name, second_token_spread(), 1e-6, "differ by up to {:.3f}")


@claim(
    HOMEWORK,
    "1.4a.1",
    statement="Transformers allow full parallelization in training and in inference.",
    method=(
        "Is the input of the second generated token known before the first is chosen? Logits at place 2 for "
        "each first token."
    ),
)
def inference_parallel(t: Experiment) -> None:
    case_name = "two generated tokens: the second's logits, over the choices of the first"
    t.assert_below(case_name, second_token_spread(), 1e-9, "differ by up to {:.3f}")
    model = _config(16, n_layers=1).build().double().eval()
    full_logits = model(torch.tensor([[0, 1, 2]]))[:, 1]
    prompt = model(torch.tensor([[0, 1]]))[:, -1]
    correct = "Training, encoders and the reading of a prompt are parallel; generation takes one pass after another, "
    t.correction(
        f"{correct}because each token is the input of the next.", torch.allclose(full_logits, prompt, atol=1e-12)
    )


def _train(masked: bool, seed: int, t: Experiment) -> tuple[float, float]:
    """Return the loss after training on random tokens, and the accuracy of generated tokens."""
    torch.manual_seed(seed)
    model = _config(8, n_layers=1, tie_embeddings=False, mask=causal() if masked else full()).build()

    def loss() -> Tensor:
        ids = torch.randint(0, 5, (32, 9), generator=t.generator)
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    losses = fit(model.parameters(), loss, 70, lr=0.01)
    with torch.no_grad():
        ids = torch.randint(0, 5, (400, 9), generator=t.generator)
        # Generating: at place i only the tokens up to i exist.
        hits = [(model(ids[:, : i + 1])[:, -1].argmax(-1) == ids[:, i + 1]).float().mean() for i in range(8)]
    return sum(losses[-20:]) / 20, float(torch.stack(hits).mean())


@claim(
    EXAM,
    "Q5b",
    statement="Causal masking is essential when a decoder is trained.",
    method=(
        "Next-token training on random tokens (best possible loss ln 5), 70 steps, two seeds, with and "
        "without the mask; then generation, 3,200 guesses (95 % interval of chance: 0.2 ± 0.014)."
    ),
)
def causal_mask_essential(t: Experiment) -> None:
    for seed in (2 * t.seed, 2 * t.seed + 1):
        loss, _ = _train(True, seed, t)
        t.record_case("with the mask: loss", f"{loss:.3f} against ln 5 = {math.log(5):.3f}", loss > math.log(5) - 0.03)
        cheat, accuracy = _train(False, seed, t)
        t.record_case("without it: loss below what is possible", f"{cheat:.3f}", cheat < 0.5 * math.log(5))
        result_text = f"{accuracy:.3f} right, chance is 0.2"
        t.record_case("and yet its guesses when generating", result_text, abs(accuracy - 0.2) < 0.03)
