"""Problem 1.5: the vision Transformer."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from clearhead.course.answers.content import AnswerTable


def _seven() -> Tensor:
    """Return a gray image of a seven, (1, 1, 32, 32)."""
    image = torch.zeros(1, 1, 32, 32)
    image[..., 6:9, 9:23] = 1.0
    for row in range(18):
        column = 21 - row * 11 // 20
        image[..., 8 + row, column - 1 : column + 2] = 1.0
    return image


@lru_cache(maxsize=1)
def _logits_of_seven() -> Tensor:
    import clearhead as ch

    with torch.no_grad():
        logits: Tensor = ch.pipeline("digits-vit").model(_seven())[0]
    return logits


def classified_seven() -> AnswerTable:
    """Return logits and probabilities of the bundled classifier for a drawn seven."""
    logits = _logits_of_seven()
    probabilities = logits.softmax(-1)
    rows = [
        [str(digit), f"{logit:.2f}".replace("-", "−"), f"{probability:.3f}"]
        for digit, (logit, probability) in enumerate(zip(logits.tolist(), probabilities.tolist(), strict=True))
    ]
    return AnswerTable(["class", "logit", "probability"], rows, "A drawn 7, classified by the bundled digits-vit.")


def sum_of_probabilities() -> str:
    """Return the sum of the probabilities."""
    return f"{_logits_of_seven().softmax(-1).sum().item():.4f}"


def base_model_sizes() -> AnswerTable:
    """Return the sizes on the way of an image through ViT-B/16."""
    side, patch, width, classes = 224, 16, 768, 1000
    n = (side // patch) ** 2
    rows: list[list[str]] = [
        ["image", f"{side} × {side} × 3", ""],
        ["flattened patches", f"{n} × {patch * patch * 3}", ""],
        ["embedded patches", f"{n} × {width}", f"{patch * patch * 3 * width + width:,}"],
        ["with the class token", f"{n + 1} × {width}", f"{width:,}"],
        ["plus positions", f"{n + 1} × {width}", f"{(n + 1) * width:,}"],
        ["output of the encoder", f"{n + 1} × {width}", "12 blocks"],
        ["row of the class token, normalized", f"1 × {width}", f"{2 * width:,}"],
        ["logits of the linear head", f"1 × {classes}", f"{width * classes + classes:,}"],
        ["softmax", f"1 × {classes}", "0"],
    ]
    return AnswerTable(["step", "size", "parameters"], rows, "ViT-B/16 at 224 × 224 pixels and 1000 classes.")


def few_data() -> AnswerTable:
    """Return the accuracies of the stored study by number of training images."""
    from clearhead.course.claims.data_efficiency import lead, mean, study

    rows: list[list[str | int]] = []
    for n in study().sizes(["vit", "cnn"]):
        rows.append([n, f"{mean('vit', n):.1%}", f"{mean('cnn', n):.1%}", str(lead("cnn", "vit", n))])
    header = ["training images", "vision Transformer", "residual network", "lead of the residual network"]
    return AnswerTable(header, rows, "Validation accuracy on digits of house numbers, means over seeds.")


def study_parameters() -> str:
    """Return the sizes of the two networks of the study."""
    from clearhead.course.claims.data_efficiency import study

    networks = study().about["networks"]
    return f"{networks['vit']['weights']:,} and {networks['cnn']['weights']:,}"
