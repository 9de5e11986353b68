"""Values, tables and figures in the answers to the Transformer homework of CSCI-GA 2572.

As in the homework, columns are queries in problems 1.1 to 1.3: S = KᵀQ, and the softmax acts on each column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from clearhead.course.answers.content import AnswerTable, format_scientific
from clearhead.masks import causal, window
from clearhead.masks.drawing import Drawing, draw

# ---------------------------------------------------------------------- 1.1: attention

KEYS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)  # d × m
QUERIES = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)  # d × n
VALUES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)  # t × m


def _weights(scores: Tensor, beta: float = 1.0) -> Tensor:
    return (beta * scores).softmax(0)


def example_inputs() -> str:
    """Return the keys, queries and values of the example."""
    names = {"keys": KEYS, "queries": QUERIES, "values": VALUES}
    return "; ".join(f"{name} {', '.join(map(_numbers, matrix.T))}" for name, matrix in names.items())


def example_scores() -> str:
    """Return S = KᵀQ of the example, row by row."""
    return _rows(KEYS.T @ QUERIES, "g")


def example_weights() -> str:
    """Return the weights of the example, row by row."""
    return _rows(_weights(KEYS.T @ QUERIES), ".3f")


def example_output() -> str:
    """Return H = VA of the example, row by row."""
    return _rows(VALUES @ _weights(KEYS.T @ QUERIES), ".3f")


def _rows(matrix: Tensor, form: str) -> str:
    return "; ".join(", ".join(format(x, form) for x in row) for row in matrix.tolist())


BETAS = (0.0, 0.5, 1.0, 2.0, 8.0)
SCORES = (4.0, 3.0, 1.0)


def weights_by_beta() -> AnswerTable:
    """Return the weights and the entropy of three scores for several β."""
    rows: list[list[str | float]] = []
    for beta in BETAS:
        weights = _weights(torch.tensor(SCORES, dtype=torch.float64), beta)
        entropy = -(weights * weights.log()).nansum().item()
        rows.append([f"{beta:g}", *(f"{weight:.4f}" for weight in weights), f"{abs(entropy):.4f}"])
    header = ["β", *(f"weight of score {score:g}" for score in SCORES), "entropy (nats)"]
    return AnswerTable(header, rows, f"Uniform weights have an entropy of ln 3 = {math.log(3):.4f}.")


GAP, N_KEYS, TARGETS = 1.0, 5, (0.5, 0.9, 0.99, 0.999)


def beta_for_weight() -> AnswerTable:
    """Return the β that gives the best of five keys a weight, if all other scores are lower by 1."""
    rows: list[list[str | float]] = []
    for target in TARGETS:
        beta = math.log((N_KEYS - 1) * target / (1 - target)) / GAP
        scores = torch.tensor([GAP, *[0.0] * (N_KEYS - 1)], dtype=torch.float64)
        rows.append([f"{target:g}", f"{beta:.3f}", f"{_weights(scores, beta)[0].item():.6f}"])
    caption = "Five keys; the best score is larger than the other four by g = 1."
    return AnswerTable(["wanted weight", "β = ln((m − 1)a/(1 − a))/g", "weight with this β"], rows, caption)


def uniformity_by_beta() -> AnswerTable:
    """Return the largest and smallest weight of three scores, with their bounds."""
    spread = max(SCORES) - min(SCORES)
    rows: list[list[str]] = []
    for beta in (1.0, 0.1, 0.01, 0.001):
        weights = _weights(torch.tensor(SCORES, dtype=torch.float64), beta)
        numbers = (weights.min(), weights.max(), math.exp(-beta * spread) / 3, math.exp(beta * spread) / 3)
        rows.append([f"{beta:g}", *(f"{float(number):.4f}" for number in numbers)])
    header = ["β", "smallest weight", "largest weight", "lower bound e^{−βΔ}/m", "upper bound e^{βΔ}/m"]
    return AnswerTable(header, rows, f"Scores 4, 3, 1: m = 3 and Δ = {spread:g}.")


def perturbed_key() -> AnswerTable:
    """Return the weights of one query before and after a step on its first key."""
    moved = KEYS.clone()
    moved[:, 0] += torch.tensor([0.1, 0.0])
    before, after = _weights(KEYS.T @ QUERIES), _weights(moved.T @ QUERIES)
    rows = [[f"a_{key + 1}1", f"{before[key, 0]:.4f}", f"{after[key, 0]:.4f}"] for key in range(3)]
    outputs_before, outputs_after = VALUES @ before, VALUES @ after
    predicted = outputs_before[:, 0] + 0.1 * QUERIES[0, 0] * before[0, 0] * (VALUES[:, 0] - outputs_before[:, 0])
    rows.append(["h_1", _vector(outputs_before[:, 0]), _vector(outputs_after[:, 0])])
    caption = f"The key k_1 moves by ε = (0.1, 0). To first order, h_1 becomes {_vector(predicted)}."
    return AnswerTable(["", "before", "after"], rows, caption)


def perturbed_query() -> AnswerTable:
    """Return the outputs before and after a step on the first query."""
    step = torch.tensor([0.1, 0.0], dtype=torch.float64)
    moved = QUERIES.clone()
    moved[:, 0] += step
    before, after = (_weights(KEYS.T @ queries) for queries in (QUERIES, moved))
    outputs_before, outputs_after = VALUES @ before, VALUES @ after
    centered = VALUES - outputs_before[:, :1]
    covariance = (before[:, 0] * centered) @ KEYS.T  # Σ a (v − h) kᵀ
    predicted = outputs_before[:, 0] + covariance @ step
    rows = [[f"h_{j + 1}", _vector(outputs_before[:, j]), _vector(outputs_after[:, j])] for j in range(2)]
    caption = f"The query q_1 moves by ε = (0.1, 0). To first order, h_1 becomes {_vector(predicted)}."
    return AnswerTable(["", "before", "after"], rows, caption)


def _vector(x: Tensor) -> str:
    return "(" + ", ".join(f"{value:.4f}".replace("-", "−") for value in x.tolist()) + ")"


def scaled_key() -> AnswerTable:
    """Return the weight of a scaled key for scores of both signs."""
    factors = (1, 2, 5, 20)
    rows: list[list[str]] = []
    for score in (2.0, 0.5, 0.0, -1.0):
        scores = [torch.tensor([factor * score, 1.0, 0.0], dtype=torch.float64) for factor in factors]
        rows.append([f"{score:g}".replace("-", "−"), *(f"{_weights(s)[0].item():.4f}" for s in scores)])
    header = ["score of the key", *(f"α = {factor}" for factor in factors)]
    return AnswerTable(header, rows, "Weight of the key next to two other keys with scores 1 and 0; β = 1.")


# ---------------------------------------------------------------------- 1.2: heads and filters


def heads_and_filters() -> AnswerTable:
    """Return the parameters of heads and of filters as their number grows."""
    rows: list[list[int]] = []
    for count in (1, 4, 8, 16):
        attention = nn.MultiheadAttention(512, count, bias=False)
        convolution = nn.Conv2d(64, count, 3, bias=False)
        rows.append([count, *(sum(p.numel() for p in layer.parameters()) for layer in (attention, convolution))])
    header = ["heads or filters", "attention of width 512", "3 × 3 filters over 64 channels"]
    return AnswerTable(header, rows, "Parameters without biases.")


# ---------------------------------------------------------------------- 1.3: self-attention


def positions_beyond_training() -> AnswerTable:
    """Return the accuracy of three encodings at the trained length, at twice and at four times that length."""
    from clearhead.course.claims.positions import previous_token_accuracy

    rows: list[list[str]] = []
    names = {"sinusoidal": "sinusoidal (absolute)", "relative bias": "relative bias", "rotary": "rotary (relative)"}
    for kind, name in names.items():
        accuracies = torch.tensor(previous_token_accuracy(kind, 0))  # (starts, lengths)
        rows.append([name, *(f"{low:.3f} to {high:.3f}" for low, high in zip(*accuracies.aminmax(dim=0), strict=True))])
    caption = (
        "Accuracy of a small layer, trained at length 12 to repeat the previous token; worst to best of three starts."
    )
    return AnswerTable(["encoding", "length 12", "length 24", "length 48"], rows, caption)


def unequal_norms() -> str:
    """Return the scores of the first of two tokens whose norms differ."""
    tokens = torch.tensor([1.0, 2.0])
    return ", ".join(f"{score:g}" for score in tokens[0] * tokens)


def sharpness_of_permutation() -> AnswerTable:
    """Return the weight on the selected key for n one-hot positions and a growing factor b."""
    rows: list[list[str]] = []
    for factor in (1.0, 5.0, 10.0, 20.0):
        cells = []
        for n in (4, 64):
            scores = torch.zeros(n, dtype=torch.float64)
            scores[0] = factor
            cells.append(format_scientific(1 - scores.softmax(0)[0].item()))
        rows.append([f"{factor:g}", *cells])
    caption = "Weight outside of the selected key, 1 − a = (n − 1)/(n − 1 + e^b)."
    return AnswerTable(["b", "n = 4", "n = 64"], rows, caption)


KERNEL = (0.25, 0.5, 0.25)


def convolution_by_bias() -> str:
    """Return the largest difference of biased attention and a convolution at positions with a whole window."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 4, generator=generator).double(), torch.randn(4, 3, generator=generator).double()
    difference = _biased_attention(x, w) - _convolve(x, [k * w for k in KERNEL])
    return format_scientific(difference[1:-1].abs().max().item())


def convolution_by_bias_at_end() -> str:
    """Return the weights of the first position, whose window is incomplete."""
    weights = _biased_attention(torch.eye(9, dtype=torch.float64), torch.eye(9, dtype=torch.float64))[0, :2]
    return ", ".join(f"{weight:.4f}" for weight in weights.tolist())


def _biased_attention(x: Tensor, w: Tensor) -> Tensor:
    """Return attention whose scores are ln κ of the offset, without content."""
    offset = torch.arange(len(x)) - torch.arange(len(x))[:, None]
    kernel = torch.tensor(KERNEL, dtype=x.dtype)
    scores = kernel.log()[(offset + 1).clamp(0, 2)].masked_fill(offset.abs() > 1, -math.inf)
    return scores.softmax(-1) @ (x @ w)


def _convolve(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """Return Σ_δ x_{i+δ} W_δ with zeros outside of the sequence, by a loop."""
    reach = len(matrices) // 2
    rows = []
    for i in range(len(x)):
        terms = [x[i + δ - reach] @ w for δ, w in enumerate(matrices) if 0 <= i + δ - reach < len(x)]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


def convolution_by_heads() -> str:
    """Return the largest difference of three shifting heads and a convolution with any three matrices."""
    return format_scientific(_heads_against_convolution(1000.0))


def convolution_by_soft_heads() -> AnswerTable:
    """Return the same difference for heads of several sharpness."""
    rows = [
        [f"{factor:g}", format_scientific(_heads_against_convolution(factor))] for factor in (2.0, 8.0, 32.0, 1000.0)
    ]
    return AnswerTable(
        ["b", "largest difference"], rows, "Three heads with scores −b(j − i − δ)² against the convolution."
    )


def _heads_against_convolution(factor: float) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    matrices = list(torch.randn(3, 4, 3, generator=generator, dtype=torch.float64))
    position = torch.arange(9)
    heads = []
    for shift, w in zip((-1, 0, 1), matrices, strict=True):
        offset = (position - position[:, None] - shift).double()
        heads.append((-factor * offset**2).softmax(-1) @ x @ w)
    return (sum(heads) - _convolve(x, matrices))[1:-1].abs().max().item()


def streaming_mask() -> Drawing:
    """Return a causal mask with bounded memory."""
    return draw(causal() & window(3, 0), 10)


def lookahead_mask() -> Drawing:
    """Return a mask with bounded memory and a look-ahead of one position."""
    return draw(window(3, 1), 10)


# ---------------------------------------------------------------------- 1.4: the Transformer

WIDTH = 512


def layer_costs() -> AnswerTable:
    """Return multiply-adds of a recurrent and a self-attention layer for growing lengths."""
    rows: list[list[int | float]] = []
    for n in (64, 256, 512, 2048, 16384):
        products = 2 * n**2 * WIDTH
        projections = 4 * n * WIDTH**2
        recurrent = 2 * n * WIDTH**2
        rows.append([n, recurrent, products, projections, (products + projections) / recurrent])
    header = ["n", "recurrent: 2nd²", "QKᵀ and AV: 2n²d", "projections: 4nd²", "attention/recurrent"]
    return AnswerTable(header, rows, f"Multiply-adds of one layer with d = {WIDTH}.")


CONTEXTS = ("We park here.", "The park is here.")
COMMON_WORD = "park"


@lru_cache(maxsize=1)
def _contexts() -> tuple[list[str], list[float]]:
    """Return the translations of both sentences, and the similarity of the vectors of their common word by layer."""
    import clearhead as ch

    pipeline = ch.pipeline("en-es")
    encoder = pipeline.model.get_submodule("encoder")
    modules = [encoder.get_submodule("embedding"), *encoder.get_submodule("blocks").children()]
    states = []
    for sentence in CONTEXTS:
        ids = pipeline.tokenizer.encode(sentence)
        position = [token.strip() for token in pipeline.tokenizer.tokens(ids)].index(COMMON_WORD)
        recorded: list[Tensor] = []
        handles = [_record_output(module, recorded, position) for module in modules]
        with torch.no_grad():
            encoder(torch.tensor([[*ids, *pipeline.stop_ids]]))
        for handle in handles:
            handle.remove()
        states.append(recorded)
    similarities = [nn.functional.cosine_similarity(a, b, dim=0).item() for a, b in zip(*states, strict=True)]
    return pipeline.translate(list(CONTEXTS)), similarities


def _record_output(module: nn.Module, recorded: list[Tensor], position: int) -> torch.utils.hooks.RemovableHandle:
    def record(module: nn.Module, inputs: object, output: Tensor) -> None:
        recorded.append(output[0, position])

    return module.register_forward_hook(record)


def translations_of_common_word() -> AnswerTable:
    """Return two sentences with a common word, and their translations."""
    rows = [[source, target] for source, target in zip(CONTEXTS, _contexts()[0], strict=True)]
    return AnswerTable(["English", "Spanish, by the bundled translator"], rows)


def similarity_by_layer() -> AnswerTable:
    """Return the cosine of the vectors of the common word, by layer."""
    similarities = _contexts()[1]
    header = ["", "embedding", *(f"block {layer}" for layer in range(len(similarities) - 1))]
    row = ["cosine of the two vectors", *(f"{value:.2f}" for value in similarities)]
    caption = f"Similarity of “{COMMON_WORD}” in the two sentences; it is the second token in both."
    return AnswerTable(header, [row], caption)


def two_hard_heads() -> AnswerTable:
    """Return outputs for two values with one and with two heads."""
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    one = 0.5 * values[0] + 0.5 * values[1]
    two = torch.cat((values[0], values[1]))
    swapped = torch.cat((values[1], values[0]))
    rows = [
        ["one head, weights ½ and ½", _numbers(one), _numbers(one)],
        ["two heads, one per token", _numbers(two), _numbers(swapped)],
    ]
    return AnswerTable(["", "output for the values u, v", "for v, u"], rows, "u = (1, 0) and v = (0, 1).")


def _numbers(x: Tensor) -> str:
    return "(" + ", ".join(f"{value:g}" for value in x.tolist()) + ")"


def feed_forward_parameters() -> AnswerTable:
    """Return the parameters of the parts of one encoder layer of the original size."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048)
    attention = sum(p.numel() for p in layer.self_attn.parameters())
    feed_forward = sum(p.numel() for part in (layer.linear1, layer.linear2) for p in part.parameters())
    total = sum(p.numel() for p in layer.parameters())
    rows: list[list[str | int]] = [
        ["multi-head attention", attention, f"{attention / total:.1%}"],
        ["feed-forward network", feed_forward, f"{feed_forward / total:.1%}"],
        ["two layer norms", total - attention - feed_forward, f"{(total - attention - feed_forward) / total:.1%}"],
    ]
    return AnswerTable(["part", "parameters", "share"], rows, "One encoder layer with d_model = 512 and d_ff = 2048.")


def bottleneck_ranks() -> AnswerTable:
    """Return the rank of a linear map of 512 features through narrower and wider middles."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[str | int]] = []
    for middle in (128, 512, 2048):
        first = torch.randn(512, middle, generator=generator, dtype=torch.float64)
        second = torch.randn(middle, 512, generator=generator, dtype=torch.float64)
        rank = int(torch.linalg.matrix_rank(first @ second))
        rows.append([f"512 → {middle} → 512", rank])
    return AnswerTable(
        ["layer without its ReLU", "rank"], rows, "A bottleneck loses dimensions; 2048 is wider, not narrower."
    )


def rank_collapse() -> AnswerTable:
    """Return how much tokens differ from their mean after layers of attention alone and of whole blocks."""
    torch.manual_seed(0)
    layers, width, n = 8, 32, 12
    x = torch.randn(1, n, width, dtype=torch.float64)
    attention = [nn.MultiheadAttention(width, 4, bias=False, batch_first=True).double() for _ in range(layers)]
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True).double() for _ in range(layers)
    ]

    def attend(layer: nn.Module, y: Tensor) -> Tensor:
        output: Tensor = layer(y, y, y, need_weights=False)[0]
        return output

    def spread(y: Tensor) -> str:
        return format_scientific(((y - y.mean(1, keepdim=True)).norm() / y.norm()).item())

    rows = []
    alone, whole = x, x
    with torch.no_grad():
        for i in range(layers):
            alone, whole = attend(attention[i], alone), blocks[i](whole)
            if i + 1 in (1, 2, 4, 8):
                rows.append([str(i + 1), spread(alone), spread(whole)])
    header = ["layers", "attention alone", "with residuals, norms and feed-forward"]
    return AnswerTable(header, rows, "Share of the vectors that is not common to all tokens, at initialization.")


DEPTH = 24


def gradients_through_depth() -> AnswerTable:
    """Return the gradient that reaches the input of 24 blocks, by placement of skip and norm."""
    norm = nn.LayerNorm(32, dtype=torch.float64)
    designs: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
        "F(x)": lambda f, x: f(x),
        "x + F(x)": lambda f, x: x + f(x),
        "LN(F(x))": lambda f, x: norm(f(x)),
        "LN(x + F(x)), post-norm": lambda f, x: norm(x + f(x)),
        "x + F(LN(x)), pre-norm": lambda f, x: x + f(norm(x)),
    }
    rows = []
    for name, block in designs.items():
        cells = [format_scientific(_gradient_ratio(block, gain)) for gain in (0.5, 1.0, 2.0)]
        rows.append([name, *cells])
    header = ["block", "weights × 0.5", "weights × 1", "weights × 2"]
    caption = f"Norm of the gradient at the input of {DEPTH} blocks, divided by its norm at their output."
    return AnswerTable(header, rows, caption)


def _gradient_ratio(block: Callable[[nn.Module, Tensor], Tensor], gain: float) -> float:
    torch.manual_seed(0)
    x = torch.randn(16, 32, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(DEPTH):
        function = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)).double()
        with torch.no_grad():
            for parameter in function.parameters():
                parameter.mul_(gain)
        y = block(function, y)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    (at_input,) = torch.autograd.grad(y, x, gradient)
    return (at_input.norm() / gradient.norm()).item()


def norm_of_positions() -> str:
    """Return mean and deviation of two tokens of one example after layer norm."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]])
    y = nn.LayerNorm(4, eps=0.0)(x)
    return "; ".join(_vector(token) for token in y[0].detach())


# ---------------------------------------------------------------------- 1.5: the vision Transformer


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
