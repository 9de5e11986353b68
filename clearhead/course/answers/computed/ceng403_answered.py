"""Values, tables and figures in the answers to the answered CENG 403 exam."""

from __future__ import annotations

from functools import lru_cache

import sympy as sp
import torch
from torch import Tensor

from clearhead.course.answers.content import AnswerTable, SvgFigure, format_scientific

# ---------------------------------------------------------------------- Q1a: the scale

WIDTHS = (4, 64, 1024)


def scale_and_saturation() -> AnswerTable:
    """Return deviation, largest weight and gradient of unscaled and scaled scores at several widths."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[str | float]] = []
    for width in WIDTHS:
        queries = torch.randn(2000, width, generator=generator, dtype=torch.float64)
        keys = torch.randn(8, width, generator=generator, dtype=torch.float64)
        scores = queries @ keys.T
        row: list[str | float] = [str(width)]
        for values in (scores, scores / width**0.5):
            weights = values.softmax(-1)
            slope = (weights * (1 - weights)).mean()
            row += [values.std().item(), weights.amax(-1).mean().item(), slope.item()]
        rows.append(row)
    header = ["d_k", "σ(q·k)", "largest weight", "slope a(1 − a)"]
    header += ["σ, scaled", "largest weight, scaled", "slope, scaled"]
    return AnswerTable(header, rows, "Means over 2,000 random queries and 8 keys with standard normal entries.")


# ---------------------------------------------------------------------- Q1b: the weights of one query

SCORES = (2, -1, 0, 1)


def weights_of_four_scores() -> str:
    """Return the weights of four scores, rounded."""
    return ", ".join(f"{weight:.4f}" for weight in _softmax(SCORES))


def weights_of_shifted_scores() -> str:
    """Return the weights of the same scores plus 1000, computed as implementations do."""
    return ", ".join(f"{weight:.4f}" for weight in _softmax([score + 1000 for score in SCORES]))


def sum_of_weights() -> str:
    """Return the exact sum of the weights of the four scores."""
    terms = [sp.exp(score) for score in SCORES]
    return str(sp.simplify(sum(term / sum(terms) for term in terms)))


def _softmax(scores: tuple[int, ...] | list[int]) -> list[float]:
    weights: list[float] = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    return weights


# ---------------------------------------------------------------------- Q1c: cost

LENGTHS, MODEL_WIDTH = (32, 512, 8192, 131072), 512


def cost_of_a_layer() -> AnswerTable:
    """Return multiply-adds and stored values of a layer of attention and a recurrent layer."""
    rows: list[list[str | int | float]] = []
    for n in LENGTHS:
        attention = 4 * n * MODEL_WIDTH**2 + 2 * n**2 * MODEL_WIDTH
        recurrent = 2 * n * MODEL_WIDTH**2
        rows.append([n, attention, recurrent, attention / recurrent, n**2])
    header = ["n", "attention", "recurrent", "ratio", "weights stored"]
    caption = "Multiply-adds of one layer with d = 512: 4nd² + 2n²d with projections and W_O, and 2nd²."
    return AnswerTable(header, rows, caption)


# ---------------------------------------------------------------------- Q1d: two orders of three words


def two_orders() -> AnswerTable:
    """Return the output at every word of two sentences, without and with positions."""
    from clearhead.nn.positions import Sinusoidal

    generator = torch.Generator().manual_seed(1)
    vectors = dict(
        zip(("cat", "chased", "dog"), torch.randn(3, 8, generator=generator, dtype=torch.float64), strict=True)
    )
    projections = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64) / 8**0.5
    table = Sinusoidal().table(3, 8).double()
    rows: list[list[str | float]] = []
    for name, added in (("none", torch.zeros_like(table)), ("sinusoidal", table)):
        outputs = []
        for sentence in (("cat", "chased", "dog"), ("dog", "chased", "cat")):
            x = torch.stack([vectors[word] for word in sentence]) + added
            outputs.append(dict(zip(sentence, _self_attention(x, projections), strict=True)))
        differences = [(outputs[0][word] - outputs[1][word]).abs().max().item() for word in vectors]
        rows.append([name, *(format_scientific(difference) for difference in differences)])
    header = ["positions", *(f"“{word}”" for word in vectors)]
    return AnswerTable(header, rows, "Largest difference between the outputs of a word in the two sentences.")


def _self_attention(x: Tensor, projections: Tensor) -> Tensor:
    q, k, v = x @ projections
    return (q @ k.T / q.shape[-1] ** 0.5).softmax(-1) @ v


# ---------------------------------------------------------------------- Q2a: parameters

N_HEADS = 8


def head_parameters() -> int:
    """Return the parameters of the projections of one head."""
    return 3 * MODEL_WIDTH * (MODEL_WIDTH // N_HEADS)


def projection_parameters() -> int:
    """Return the parameters of the projections of all heads."""
    return N_HEADS * head_parameters()


def output_parameters() -> int:
    """Return the parameters of the output projection."""
    return MODEL_WIDTH**2


def layer_parameters() -> int:
    """Return the parameters of the layer, without biases."""
    return projection_parameters() + output_parameters()


# ---------------------------------------------------------------------- Q2b: the mask


def mask_times_infinity() -> str:
    """Return the first row of scores after the printed line 24, with its own mask."""
    mask = torch.zeros(2, 2).masked_fill(torch.ones(2, 2).triu(1).bool(), float("-inf"))
    row = (torch.ones(2, 2) + mask * float("-inf"))[0]
    return ", ".join("NaN" if value.isnan() else f"{value:g}".replace("inf", "∞") for value in row)


# ---------------------------------------------------------------------- Q2c: heads of a trained translator

# Relation, sentence, query, key, and the head that serves as the example.
RELATIONS = (
    ("verb and subject", "The girls are singing.", "are", "girls", (3, 4)),
    ("the same, four apart", "The girls in the garden are singing.", "are", "girls", (3, 4)),
    ("possessive and owner", "My sister bought her book.", "her", "sister", (1, 0)),
    ("the same, five apart", "The girl who lives here lost her dog.", "her", "girl", (1, 0)),
    ("pronoun and name", "Tom said that he was tired.", "he", "Tom", (2, 0)),
    ("adjective and noun", "The big house is old.", "big", "house", (2, 6)),
    ("negation and verb", "He does not know.", "not", "know", (2, 6)),
    ("previous word", "The old man gave the old dog some bread.", "gave", "man", (3, 5)),
    ("question mark", "Where is my book?", "Where", "?", (3, 5)),
    ("pronoun and noun", "The cat is black because it is old.", "it", "cat", (2, 2)),
    ("singular subject", "The man with the dog is tired.", "is", "man", (3, 4)),
)


@lru_cache(maxsize=1)
def _encoder_weights() -> dict[str, tuple[list[str], Tensor]]:
    """Return for every sentence its tokens and the weights of all heads of the encoder, (L, H, T, T)."""
    import clearhead as ch
    from clearhead.analysis import attention_report

    pipeline = ch.pipeline("en-es")
    results = {}
    for sentence in dict.fromkeys(relation[1] for relation in RELATIONS):
        report = attention_report(pipeline, sentence)
        maps = [m for m in report.maps if m.path.startswith("encoder.")]
        tokens = [token.strip() for token in maps[0].columns]
        results[sentence] = tokens, torch.stack([m.all_heads() for m in maps])
    return results


def heads_and_relations() -> AnswerTable:
    """Return the weight of one head on a linguistic relation, compared with the other heads."""
    rows: list[list[str | int | float]] = []
    for relation, sentence, query, key, (layer, head) in RELATIONS:
        tokens, weights = _encoder_weights()[sentence]
        on_key = weights[:, :, tokens.index(query), tokens.index(key)]
        others = (on_key.sum() - on_key[layer, head]) / (on_key.numel() - 1)
        example = f"“{sentence}” {query} → {key}"
        weight = on_key[layer, head].item()
        rows.append([relation, example, f"{layer}.{head}", f"{weight:.2f}", f"{others.item():.2f}"])
    caption = (
        "Weight from query to key in the encoder of the bundled translator, and its mean over all other heads of the "
        "encoder. A head is written LAYER.HEAD."
    )
    return AnswerTable(["relation", "sentence, query → key", "head", "weight", "other heads"], rows, caption)


def encoder_layers() -> int:
    """Return the number of layers of the translator's encoder."""
    return _head_counts()[0]


def encoder_heads() -> int:
    """Return the number of heads per layer of the translator's encoder."""
    return _head_counts()[1]


def _head_counts() -> tuple[int, int]:
    _, weights = next(iter(_encoder_weights().values()))
    return weights.shape[0], weights.shape[1]


def encoder_head_labels() -> AnswerTable:
    """Return the pattern that is the label of each head of the encoder in one sentence."""
    import clearhead as ch
    from clearhead.analysis import attention_report

    report = attention_report(ch.pipeline("en-es"), "The old man gave the old dog some bread.")
    rows: list[list[str | int]] = []
    for attention_map in report.maps:
        if attention_map.path.startswith("encoder."):
            names = [label.name for label in attention_map.summary.labels]
            rows.append([attention_map.layer, *names])
    header = ["layer", *(f"head {head}" for head in range(len(rows[0]) - 1))]
    return AnswerTable(header, rows, "Pattern to which each head gives at least half of its weight.")


def verb_and_subject_heads() -> SvgFigure:
    """Return the weights of two heads for one sentence."""
    from clearhead._core.plotting import new_figure, render_figure
    from clearhead.analysis.views.terminal import heatmap

    tokens, weights = _encoder_weights()["The girls in the garden are singing."]
    figure = new_figure(7.2, 3.4)
    drawings = []
    for panel, (layer, head, title) in enumerate(((2, 6, "head 2.6: the next word"), (3, 4, "head 3.4: the subject"))):
        matrix = weights[layer, head]
        axes = figure.add_subplot(1, 2, panel + 1)
        axes.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=8)
        drawings.append(f"{title}\n{heatmap(matrix, tokens, tokens)}")
    markup = render_figure(figure, ".svg", svg_fonts="path").decode()
    caption = "Rows are queries, columns keys. “are” attends to “girls”, four words back."
    return SvgFigure(markup[markup.index("<svg") :], "\n\n".join(drawings), caption)
