"""The baselines, read from their configurations: convolutional, recurrent, linear, auto-encoder.

A recurrent layer's products are exact; what its kernels keep is the cell's own need (gates and states), which
torch's fused kernels round up as they like.

    B batch   T tokens   S source tokens   M width of a state   I width of an input   V vocabulary   G gates
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from clearhead.costs.amounts import ONE, ZERO, Amount, product, total
from clearhead.costs.layers import (
    Setting,
    Shape,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    linear,
    squares,
)
from clearhead.costs.program import Kernel, Made, Op
from clearhead.layers.feedforward import ReLU
from clearhead.models.autoencoder import AutoencoderConfig
from clearhead.models.convnet import ConvHead, ConvNetConfig, LinearHead, shapes
from clearhead.models.linear import LogisticRegressionConfig
from clearhead.models.recurrent import GRU, LSTM, RNN, Classify, RecurrentConfig
from clearhead.models.recurrent_seq2seq import AfterStep, RecurrentSeq2SeqConfig

__all__ = ["autoencoder", "convnet", "logistic", "recurrent", "recurrent_layer", "seq2seq"]

_ID = 8
_GATES = {RNN: 1, GRU: 3, LSTM: 4}
# What a cell keeps of a step, in states: its output, and for gated cells the gates, their inputs and the state itself.
_KEPT = {RNN: 1, GRU: 7, LSTM: 7}


@dataclass(frozen=True)
class Walk:
    """One layer of cells over one sequence: its lengths and widths, and whether the first state is learned from."""

    T: Amount
    d_in: Amount
    M: Amount
    learned_start: bool = False
    input_gradient: bool = True


def recurrent_layer(s: Setting, name: str, part: str, cell: RNN | GRU | LSTM, x: str, y: str, walk: Walk) -> None:
    """All steps of one layer: the inputs' product at once, then T products of the state, one after the other."""
    p, G = s.program, _GATES[type(cell)]
    gates, kept = walk.M * G, _KEPT[type(cell)]
    own = (
        p.parameter(f"{name}.weight_ih", part, gates * walk.d_in),
        p.parameter(f"{name}.weight_hh", part, gates * walk.M),
        p.parameter(f"{name}.bias_ih", part, gates),
        p.parameter(f"{name}.bias_hh", part, gates),
    )
    rows, w = s.B * walk.T, s.itemsize
    inputs = Kernel((rows * (walk.d_in + gates) + gates * walk.d_in) * w, 2 * product(rows, walk.d_in, gates))
    step = (s.B * (walk.M * 2 + gates * 2) + gates * walk.M) * w
    states = Kernel(step * walk.T, 2 * product(rows, walk.M, gates), walk.T)
    # Backward needs both products twice, but the gradient of a first state that nobody learns from is not computed.
    saved = ZERO if walk.learned_start else 2 * product(s.B, walk.M, gates)
    back_states = Kernel(step * walk.T * 2, 2 * states.operations - saved, walk.T)
    p.add(
        Op(
            name,
            part,
            (x,),
            (s.tensor(y, rows * walk.M),),
            forward=(inputs, states),
            backward=(*((inputs,) * (2 if walk.input_gradient else 1)), back_states),
            keeps=(x,),
            notes=(s.tensor("steps", (rows + s.B) * walk.M if kept == 1 else rows * walk.M * kept),),
            parameters=own,
            elements=rows * gates,
        )
    )


def _stack(
    s: Setting,
    tag: str,
    config: RecurrentConfig | RecurrentSeq2SeqConfig,
    x: str,
    walk: Walk,
    *,
    both_ways: bool,
) -> Amount:
    """All layers: from x to "states"; returns the width of a state's output."""
    M, p = walk.M, s.program
    width = walk.d_in
    W = M * 2 if both_ways else M
    p.alias("states", x)
    for i in range(config.n_layers):
        if i:
            last = dropout(s, tag, "states", "between", s.B * walk.T * width, config.dropout)
            p.alias("states", last)
            p.drop("between")
        layer = Walk(walk.T, width, M, walk.learned_start)
        recurrent_layer(s, f"{tag}.layers.{i}", tag, config.cell, "states", "ahead", layer)
        if both_ways:
            elements = s.B * walk.T * width
            elementwise(s, "turn", tag, ("states",), s.tensor("turned", elements))
            back = Walk(walk.T, width, M)
            recurrent_layer(s, f"{tag}.reverse_layers.{i}", tag, config.cell, "turned", "behind", back)
            elementwise(
                s,
                "join",
                tag,
                ("ahead", "behind"),
                s.tensor("joined", s.B * walk.T * W),
                passes=("ahead", "behind"),
            )
            p.alias("ahead", "joined")
            p.drop("turned", "behind", "joined")
        p.alias("states", "ahead")
        p.drop("ahead")
        width = W
    return W


def recurrent(s: Setting, config: RecurrentConfig, tokens: int) -> None:
    """Ids in, logits out: one for each token, or one for the whole."""
    T, M, V = s.letter("T", tokens), s.letter("M", config.d_model), s.letter("V", config.vocab_size)
    p, rows = s.program, s.B * T
    p.inputs.append(Made("ids", rows * _ID))
    embedding(s, "embedding", "ids", "embedded", rows, V, M, scaled=False)
    first = dropout(s, "embedding", "embedded", "first", rows * M, config.dropout)
    W = _stack(s, "recurrence", config, first, Walk(T, M, M), both_ways=config.bidirectional)
    p.drop("embedded", "first")
    last = dropout(s, "recurrence", "states", "last", rows * W, config.dropout)
    if isinstance(config.task, Classify):
        elementwise(s, "summary", "logits", (last,), s.tensor("summary", s.B * W))
        C = s.letter("n_c", config.task.n_classes)
        linear(s, "head", "logits", "summary", "logits", Shape(s.B, W, C))
        rows, V = s.B, C
    elif config.task.tied:
        linear(s, "head", "logits", last, "logits", Shape(rows, W, V), bias=False, weight="embedding.weight")
    else:
        linear(s, "head", "logits", last, "logits", Shape(rows, W, V))
    p.drop("states", "last", "summary")
    if s.training:
        p.inputs.append(Made("targets", rows * _ID))
        cross_entropy(s, "logits", rows, V)


def seq2seq(s: Setting, config: RecurrentSeq2SeqConfig, source: int, target: int) -> None:
    """Source and target ids in, logits of the target out, through additive attention."""
    S, T, M = s.letter("S", source), s.letter("T", target), s.letter("M", config.d_model)
    V = s.letter("V", config.vocab_size)
    source_V = (
        V if config.source_vocab_size in (None, config.vocab_size) else s.letter("V_s", config.source_vocab_size or 0)
    )
    A = M if config.d_attention is None else s.letter("A", config.d_attention)
    p, rows = s.program, s.B * T
    p.inputs += [Made("source ids", s.B * S * _ID), Made("ids", rows * _ID)]
    embedding(s, "source embedding", "source ids", "embedded", s.B * S, source_V, M, scaled=False)
    first = dropout(s, "embedding", "embedded", "first", s.B * S * M, config.dropout)
    W = _stack(s, "encoder", config, first, Walk(S, M, M), both_ways=config.bidirectional)
    p.alias("memory", "states")
    p.drop("states", "embedded", "first")
    n_states = s.letter("n_s", config.n_layers * config.cell.n_states)
    elementwise(s, "summary", "bridge", ("memory",), s.tensor("summary", s.B * W))
    linear(s, "bridge", "bridge", "summary", "bridged", Shape(s.B, W, M * n_states))
    elementwise(s, "tanh", "bridge", ("bridged",), s.tensor("start", s.B * M * n_states), keeps=("start",))
    p.drop("summary", "bridged")
    embedding(s, "target embedding", "ids", "written", rows, V, M, scaled=False)
    first = dropout(s, "embedding", "written", "written first", rows * M, config.dropout)
    is_after = isinstance(config.attention, AfterStep)
    d_in = M if is_after else M + W
    if not is_after:
        p.alias("states", first)
        _look(s, T, S, M, W, A, launches=T)
        elementwise(
            s,
            "join",
            "attention",
            (first, "context"),
            s.tensor("step inputs", rows * d_in),
            passes=(first, "context"),
        )
        first = "step inputs"
    _stack(s, "decoder", config, first, Walk(T, d_in, M, learned_start=True), both_ways=False)
    if is_after:
        _look(s, T, S, M, W, A, launches=ONE)
    elementwise(
        s,
        "join",
        "mix",
        ("states", "context"),
        s.tensor("both", rows * (M + W)),
        passes=("states", "context"),
    )
    linear(s, "mix", "mix", "both", "mixed", Shape(rows, M + W, M))
    elementwise(s, "tanh", "mix", ("mixed",), s.tensor("bent", rows * M), keeps=("bent",))
    last = dropout(s, "mix", "bent", "bent dropped", rows * M, config.dropout)
    linear(s, "head", "logits", last, "logits", Shape(rows, M, V))
    p.drop(
        "states",
        "context",
        "both",
        "mixed",
        "bent",
        "bent dropped",
        "memory",
        "start",
        "written",
        "written first",
        "step inputs",
    )
    if s.training:
        p.inputs.append(Made("targets", rows * _ID))
        cross_entropy(s, "logits", rows, V)


def _look(s: Setting, T: Amount, S: Amount, M: Amount, W: Amount, A: Amount, *, launches: Amount) -> None:
    """Additive attention: uᵀ tanh(W q + U k) for every pair, a softmax, the weighted sum. Looking step by step, the
    keys' product is computed anew each time.
    """
    p, w = s.program, s.itemsize
    own = (
        p.parameter("attention.query_weight", "attention", M * A),
        p.parameter("attention.key_weight", "attention", W * A),
        p.parameter("attention.out_weight", "attention", A),
    )
    rows, sources, cells = s.B * T, s.B * S * launches, s.B * T * S
    products = 2 * total((product(rows, M, A), product(sources, W, A), cells * A, cells * W))
    moved = (rows * (M + A) + sources * (W + A) + cells * A * 3 + cells * 2 + rows * W) * w
    hidden = s.tensor("hidden", cells * A)
    weights = s.tensor("weights", cells)
    p.add(
        Op(
            "look",
            "attention",
            ("states", "memory"),
            (s.tensor("context", rows * W),),
            forward=(Kernel(moved, products, launches),),
            backward=(Kernel(moved * 2, 2 * products, launches),),
            keeps=("states", "memory"),
            notes=(hidden, weights),
            parameters=own,
            scratch=hidden.n_bytes,
            backward_scratch=hidden.n_bytes * 2,
            elements=cells * A + cells,
        )
    )


# ---------------------------------------------------------------------- without a sequence


def convnet(s: Setting, config: ConvNetConfig) -> None:
    """Images in, class logits out."""
    p, w, table = s.program, s.itemsize, shapes(config)
    height, width = config.image_size
    inner, places = s.letter("C", config.n_channels), height * width
    p.inputs.append(s.tensor("x", s.B * inner * places))
    for i, filters in enumerate(config.filters):
        n, k = f"_{i + 1}", config.kernels[i]
        outer = s.letter(f"C{n}", filters)
        _, rows, columns = table[f"conv{i + 1}"]
        # A convolution is a linear map of every place's window: the same products, without a copy of the windows.
        shape = Shape(s.B * rows * columns, inner * (k * k), outer)
        read = s.B * inner * places
        linear(s, f"conv{i + 1}", "convolutions", "x", "convolved", shape, input_gradient=i > 0, read=read)
        _, rows, columns = table[f"pool{i + 1}"]
        pooled = s.tensor("pooled", s.B * outer * rows * columns)
        moved = s.B * outer * (rows * columns * (1 + config.pools[i] ** 2)) * w
        p.add(
            Op(
                "pool",
                "pooling",
                ("convolved",),
                (pooled,),
                forward=(Kernel(moved),),
                backward=(Kernel(moved),),
                keeps=("convolved",),
            )
        )
        p.drop("convolved")
        elementwise(s, "relu", "pooling", ("pooled",), s.tensor("x", s.B * outer * rows * columns), keeps=("x",))
        p.drop("pooled")
        inner, places = outer, rows * columns
    C = s.letter("n_c", config.n_classes)
    if isinstance(config.head, LinearHead):
        linear(s, "head", "logits", "x", "logits", Shape(s.B, inner * places, C))
    else:
        kernel = places if isinstance(config.head, ConvHead) else 1
        linear(s, "head", "logits", "x", "map", Shape(s.B * (places // kernel), inner * kernel, C))
        elementwise(s, "average", "logits", ("map",), s.tensor("logits", s.B * C))
        p.drop("map")
    p.drop("x")
    if s.training:
        p.inputs.append(Made("targets", s.B * _ID))
        cross_entropy(s, "logits", s.B, C)


def logistic(s: Setting, config: LogisticRegressionConfig) -> None:
    """Features in, class logits out."""
    F = s.letter("F", config.n_features)
    C = s.letter("n_c", config.n_classes)
    outputs = ONE if config.n_classes == 2 else C
    s.program.inputs.append(s.tensor("x", s.B * F))
    linear(s, "linear", "logits", "x", "logits", Shape(s.B, F, outputs), bias=config.bias, input_gradient=False)
    if config.n_classes == 2:
        elementwise(s, "pad", "logits", ("logits",), s.tensor("logits", s.B * C))
    if s.training:
        s.program.inputs.append(Made("targets", s.B * _ID))
        cross_entropy(s, "logits", s.B, C)


def autoencoder(s: Setting, config: AutoencoderConfig) -> None:
    """Features in, features out; the loss is their mean squared difference."""
    widths = (config.n_features, *config.hidden, config.d_latent)
    letters = ("F", *(f"F_{i + 1}" for i in range(len(config.hidden))), "Z")
    sizes = [s.letter(name, width) for name, width in zip(letters, widths, strict=True)]
    s.program.inputs.append(s.tensor("features", s.B * sizes[0]))
    s.program.alias("x", "features")
    for tag, order in (("encoder", sizes), ("decoder", sizes[::-1])):
        for i, (d_in, d_out) in enumerate(itertools.pairwise(order)):
            is_first = tag == "encoder" and i == 0
            shape = Shape(s.B, d_in, d_out)
            linear(s, f"{tag}.{i}", tag, "x", "y", shape, bias=config.bias, input_gradient=not is_first)
            if i < len(order) - 2:
                kept = "x" if isinstance(config.activation, ReLU) else "y"
                elementwise(
                    s,
                    "activation",
                    tag,
                    ("y",),
                    s.tensor("x", s.B * d_out),
                    keeps=(kept,),
                    elements=s.B * d_out,
                )
            else:
                s.program.alias("x", "y")
            s.program.drop("y")
    if s.training:
        squares(s, "x", s.B * sizes[0])
