"""Problem 1.4: costs, contexts, heads, feed-forward networks and gradients of the Transformer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from clearhead.course.answers.content import AnswerTable, format_scientific, format_vector

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
        ["one head, weights ½ and ½", format_vector(one), format_vector(one)],
        ["two heads, one per token", format_vector(two), format_vector(swapped)],
    ]
    return AnswerTable(["", "output for the values u, v", "for v, u"], rows, "u = (1, 0) and v = (0, 1).")


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
    return "; ".join(format_vector(token, ".4f") for token in y[0].detach())
