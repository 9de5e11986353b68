"""The operations of one layer: linear maps, norms, feed-forward, residuals, embeddings, the loss.

Each function writes the ops that the module of the same name runs, in its order, with what autograd keeps for
each: a linear map its input, a norm its input and statistics, GELU its input, ReLU its output, dropout its draws.

    B batch   T tokens   M model width   F feed-forward width   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from clearhead.costs.amounts import ONE, ZERO, Amount, size
from clearhead.costs.program import Ceiling, Kernel, Made, Op, Program
from clearhead.layers.feedforward import Activation, ReLU
from clearhead.layers.norms import LayerNorm, Norm

__all__ = [
    "Setting",
    "add",
    "cross_entropy",
    "dropout",
    "embedding",
    "feed_forward",
    "linear",
    "norm",
    "squares",
]

_WIDE = 4  # bytes of the float32 in which statistics are kept
_ID = 8  # bytes of a token number
_ALIGNED = 8  # elements of half precision that a tensor core loads at once


@dataclass(frozen=True)
class Setting:
    """What is the same for every layer of one prediction: batch, dtype, device, and whether dropout is on."""

    program: Program
    B: Amount
    dtype: torch.dtype
    training: bool = False
    device: str = "cuda"
    impl: str = "auto"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def letter(self, name: str, value: int) -> Amount:
        """A size with a letter, noted in the program."""
        self.program.sizes[name] = value
        return size(name, value)

    def tensor(self, name: str, elements: Amount, itemsize: int | None = None) -> Made:
        return Made(name, elements * (self.itemsize if itemsize is None else itemsize))


@dataclass(frozen=True)
class Shape:
    """A linear map: how many rows go through it, from which width to which."""

    rows: Amount
    d_in: Amount
    d_out: Amount


def linear(
    s: Setting,
    name: str,
    part: str,
    x: str,
    y: str,
    shape: Shape,
    *,
    bias: bool = True,
    weight: str | None = None,
    input_gradient: bool = True,
    read: Amount | None = None,
) -> None:
    """y = x Wᵀ + b. Keeps x. `weight` names a matrix that is shared with another layer; `read` is the number of
    elements of x where rows overlap, as a convolution's windows do.
    """
    p, w = s.program, s.itemsize
    matrix = shape.d_in * shape.d_out
    own = [p.parameter(weight or f"{name}.weight", part, matrix)]
    if bias:
        own.append(p.parameter(f"{name}.bias", part, shape.d_out))
    operations = 2 * (shape.rows * matrix)
    moved = ((shape.rows * shape.d_in if read is None else read) + matrix + shape.rows * shape.d_out) * w
    is_odd = any(width.value % _ALIGNED for width in (shape.d_in, shape.d_out))
    product = Kernel(moved, operations, ceiling=Ceiling.ODD if is_odd else Ceiling.ORDINARY)
    gradient = replace(product, ceiling=Ceiling.ODD_BACKWARD) if is_odd else product
    back = [gradient] * (2 if input_gradient else 1)
    if bias:
        back.append(Kernel(shape.rows * shape.d_out * w, ceiling=Ceiling.ROW_SUM))
    p.add(
        Op(
            name,
            part,
            takes=(x,),
            makes=(s.tensor(y, shape.rows * shape.d_out),),
            forward=(product,),
            backward=tuple(back),
            keeps=(x,),
            parameters=tuple(own),
        )
    )


def elementwise(
    s: Setting,
    name: str,
    part: str,
    takes: tuple[str, ...],
    y: Made,
    *,
    keeps: tuple[str, ...] = (),
    notes: tuple[Made, ...] = (),
    passes: tuple[str, ...] = (),
    elements: Amount = ZERO,
    scratch: Amount = ZERO,
    backward_scratch: Amount = ZERO,
) -> None:
    """One pass over tensors of the size of y: reads what it takes, writes what it makes; the same on the way back."""
    noted = sum((note.n_bytes for note in notes), ZERO)
    moved = y.n_bytes * (len(takes) + 1)
    back = () if set(takes) == set(passes) else (Kernel(y.n_bytes * (1 + len(takes)) + noted),)
    if keeps and back:
        back = (Kernel(y.n_bytes * (1 + len(takes) + len([k for k in keeps if k in takes or k == y.name])) + noted),)
    s.program.add(
        Op(
            name,
            part,
            takes,
            (y,),
            forward=(Kernel(moved + noted),),
            backward=back,
            keeps=keeps,
            notes=notes,
            passes=passes,
            elements=elements,
            scratch=scratch,
            backward_scratch=backward_scratch,
        )
    )


def add(s: Setting, part: str, a: str, b: str, y: str, elements: Amount) -> None:
    """y = a + b. Keeps nothing; both gradients are the incoming one."""
    elementwise(s, "add", part, (a, b), s.tensor(y, elements), passes=(a, b))


def dropout(s: Setting, part: str, x: str, y: str, elements: Amount, rate: float, itemsize: int | None = None) -> str:
    """The name of the result: y, or x itself where nothing is dropped. The draws are bytes on a GPU, numbers on a
    CPU.
    """
    if not s.training or rate == 0.0:
        return x
    draws = 1 if s.device == "cuda" else (s.itemsize if itemsize is None else itemsize)
    elementwise(
        s,
        "dropout",
        part,
        (x,),
        s.tensor(y, elements, itemsize),
        notes=(Made("draws", elements * draws),),
    )
    return y


def norm(s: Setting, kind: Norm, name: str, x: str, y: str, rows: Amount, width: Amount, part: str = "norms") -> None:
    """y = norm(x). Keeps x and its statistics (mean and spread, or spread alone)."""
    p = s.program
    own = [p.parameter(f"{name}.weight", part, width)]
    has_mean = isinstance(kind, LayerNorm)
    if isinstance(kind, LayerNorm) and kind.bias:
        own.append(p.parameter(f"{name}.bias", part, width))
    y_made = s.tensor(y, rows * width)
    statistic = s.itemsize if has_mean and s.device != "cuda" else _WIDE
    notes = [Made("statistics", rows * ((2 if has_mean else 1) * statistic))]
    keeps: tuple[str, ...] = (x,)
    if not has_mean and s.device != "cuda":
        # There is no fused kernel there: the normalised features are kept too, and everything in float32.
        notes.append(Made("normalised", rows * width * _WIDE))
        if s.itemsize < _WIDE:
            notes.append(Made("wide", rows * width * _WIDE))
            keeps = ()
    p.add(
        Op(
            name,
            part,
            (x,),
            (y_made,),
            forward=(Kernel(y_made.n_bytes * 2),),
            # The input's gradient in one kernel, the scale's and shift's in another: both read x and the gradient.
            backward=(Kernel(y_made.n_bytes * 3), Kernel(y_made.n_bytes * 2, ceiling=Ceiling.ROW_SUM)),
            keeps=keeps,
            notes=tuple(notes),
            parameters=tuple(own),
        )
    )


def feed_forward(
    s: Setting,
    name: str,
    activation: Activation,
    x: str,
    shape: Shape,
    *,
    bias: bool,
    rate: float,
    part: str = "feed-forward",
) -> str:
    """The ops of `FeedForward`; returns the name of its result. shape: rows, M, F."""
    p = s.program
    inner = shape.rows * shape.d_out
    up = shape
    down = Shape(shape.rows, shape.d_out, shape.d_in)
    if activation.gated:
        linear(s, f"{name}.gate", part, x, "gate", up, bias=bias)
        elementwise(
            s,
            f"{name}.activation",
            part,
            ("gate",),
            s.tensor("opened", inner),
            keeps=("gate",),
            elements=inner,
        )
        p.drop("gate")
        linear(s, f"{name}.up", part, x, "up", up, bias=bias)
        elementwise(s, f"{name}.product", part, ("opened", "up"), s.tensor("hidden", inner), keeps=("opened", "up"))
        p.drop("opened", "up")
    else:
        linear(s, f"{name}.up", part, x, "up", up, bias=bias)
        keeps = ("hidden",) if isinstance(activation, ReLU) else ("up",)
        elementwise(s, f"{name}.activation", part, ("up",), s.tensor("hidden", inner), keeps=keeps, elements=inner)
        p.drop("up")
    last = dropout(s, part, "hidden", "hidden dropped", inner, rate)
    linear(s, f"{name}.down", part, last, "fed", down, bias=bias)
    p.drop("hidden", "hidden dropped")
    return "fed"


def embedding(s: Setting, name: str, ids: str, y: str, rows: Amount, V: Amount, M: Amount, *, scaled: bool) -> str:
    """Rows of a table; returns the name of the result. Its gradient is a dense table."""
    p = s.program
    table = p.parameter(f"{name}.weight", "embedding", V * M)
    made = s.tensor("looked up" if scaled else y, rows * M)
    p.add(
        Op(
            name,
            "embedding",
            (),
            (made,),
            forward=(Kernel(made.n_bytes * 2 + rows * _ID),),
            backward=(Kernel(V * M * s.itemsize), Kernel(made.n_bytes * 3)),
            keeps=(ids,),
            parameters=(table,),
        )
    )
    if scaled:
        elementwise(s, "scale", "embedding", ("looked up",), s.tensor(y, rows * M))
        p.drop("looked up")
    return y


def cross_entropy(s: Setting, logits: str, rows: Amount, V: Amount) -> None:
    """Mean cross-entropy against class numbers: log-softmax (keeps its output), then the picked entries."""
    elementwise(
        s,
        "log-softmax",
        "loss",
        (logits,),
        s.tensor("log-probabilities", rows * V),
        keeps=("log-probabilities",),
        elements=rows * V,
    )
    whole = rows * V * s.itemsize
    s.program.add(
        Op(
            "pick",
            "loss",
            ("log-probabilities",),
            (s.tensor("loss", ONE),),
            forward=(Kernel(rows * (s.itemsize + _ID)),),
            backward=(Kernel(whole), Kernel(rows * (s.itemsize + _ID))),
            keeps=("log-probabilities",),
            notes=(s.tensor("total weight", ONE),),
        )
    )
    s.program.drop(logits, "log-probabilities")


def squares(s: Setting, x: str, elements: Amount) -> None:
    """The mean of squares: the loss of models that give vectors and not logits."""
    elementwise(
        s,
        "square",
        "loss",
        (x,),
        s.tensor("squares", elements),
        keeps=(x,),
        backward_scratch=elements * (2 * s.itemsize),
    )
    s.program.add(
        Op(
            "mean",
            "loss",
            ("squares",),
            (s.tensor("loss", ONE),),
            forward=(Kernel(elements * s.itemsize),),
            backward=(Kernel(elements * s.itemsize),),
        )
    )
    s.program.drop("squares", x)
