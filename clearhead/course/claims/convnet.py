"""The exam's convolutional network: its arithmetic, its program, its all-convolution form, and pooling."""

from __future__ import annotations

import ast

import torch
from torch import nn

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.numerics import jacobian_row, join_numbers, max_abs_diff, n_parameters
from clearhead.course.claims.registry import FINAL, HOMEWORK, claim
from clearhead.models.baselines.convnet import ConvNet, ConvNetConfig, conv_output
from clearhead.nn import MultiHeadAttention

PLACE = "Part 3, Problem 1"
# The exam's program in short: the same layers in the same order, with its commas.
PRINTED = """nn.Sequential(
    nn.Conv2d(1, 8, 5),
    nn.AvgPool2d(4)
    nn.ReLU(),
    nn.Conv2d(8, 16, 4, padding=1),
    nn.AvgPool2d(2)
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(120, 10),
)"""


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5),
        nn.AvgPool2d(4),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, padding=1),
        nn.AvgPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


@claim(
    HOMEWORK,
    "1.5a",
    statement="Convolutional networks maintain the two-dimensional spatial structure throughout the network.",
    method="Sizes after every layer of the network of the final exam, for an image of 32 × 32.",
    condition="'throughout' ends at the flattening (or a global pooling): the last layers have one vector per image",
)
def grid_throughout(t: Experiment) -> None:
    x = torch.zeros(1, 1, 32, 32)
    for layer in network(144):
        x = layer(x)
        size = " × ".join(map(str, x.shape[2:])) or "no grid"
        t.record_case(type(layer).__name__, size, x.dim() == 4, in_scope=not isinstance(layer, nn.Flatten | nn.Linear))


@claim(
    FINAL,
    "Part 1, Q4",
    statement="A 3 × 5 filter with strides 1 and 3 turns 128 × 128 into 126 × 42.",
    method="torch's own convolution, and the formula.",
)
def conv_output_size(t: Experiment) -> None:
    out = nn.Conv2d(1, 1, (3, 5), stride=(1, 3))(torch.zeros(1, 1, 128, 128))
    t.assert_equal("output", tuple(out.shape[2:]), (126, 42))


@claim(
    FINAL,
    "Part 1, Q4, solution",
    statement="The output size is M = (N − F)/S + 1.",
    method="Formula against torch at the question's sizes, and for N = 1 … 40, F = 1 … 7, S = 1 … 4 that divide.",
    condition="there is no padding and S divides N − F, as in the question; otherwise the quotient is rounded down",
)
def conv_formula(t: Experiment) -> None:
    output_sizes = [conv_output(128, 3, 1), conv_output(128, 5, 3)]
    t.assert_equal("128 with 3, 1 and with 5, 3", output_sizes, [(128 - 3) / 1 + 1, (128 - 5) / 3 + 1])
    even = [(N, F, S) for N in range(1, 41) for F in range(1, 8) for S in range(1, 5) if N >= F and (N - F) % S == 0]
    good = sum(conv_output(N, F, S) == (N - F) // S + 1 == (N - F) / S + 1 for N, F, S in even)
    t.record_case("sizes that divide", f"{good} of {len(even)}", good == len(even))
    real = nn.Conv1d(1, 1, 2, stride=2)(torch.zeros(1, 1, 3)).shape[-1]
    t.assert_equal("N = 3, F = 2, S = 2", real, (3 - 2) / 2 + 1, in_scope=False)


@claim(
    FINAL,
    f"{PLACE}.2",
    statement="Conv-1 has 8 × (5·5·1 + 1) weights, Conv-2 16 × (4·4·8 + 1), the pooling layers none.",
    method="Counted in torch's layers.",
)
def conv_weights(t: Experiment) -> None:
    counts = [n_parameters(layer) for layer in network(144)]
    t.record_case("Conv-1", counts[0], counts[0] == 8 * (5 * 5 * 1 + 1) == 208)
    t.record_case("Conv-2", f"{counts[3]:,}", counts[3] == 16 * (4 * 4 * 8 + 1) == 2064)
    t.record_case("pooling", (counts[1], counts[4]), counts[1] == counts[4] == 0)


@claim(
    FINAL,
    f"{PLACE}.3, solution",
    statement=(
        "The maps are 28 × 28 × 8, 7 × 7 × 8, 6 × 6 × 16, 3 × 3 × 16, and the flattened vector has 144 entries."
    ),
    method="A 32 × 32 image through each layer.",
)
def conv_sizes(t: Experiment) -> None:
    x = torch.zeros(1, 1, 32, 32)
    net = network(144)
    expected = {0: (8, 28, 28), 1: (8, 7, 7), 3: (16, 6, 6), 4: (16, 3, 3), 6: (144,)}
    for i, layer in enumerate(net):
        x = layer(x)
        if i in expected:
            t.assert_equal(type(layer).__name__, tuple(x.shape[1:]), expected[i])


@claim(
    FINAL,
    f"{PLACE}.3, solution",
    statement="The mismatch is repaired by nn.Linear(144, 10).",
    method="The network with commas, with 120 and with 144, on a 32 × 32 image.",
)
def conv_linear_144(t: Experiment) -> None:
    image = torch.zeros(1, 1, 32, 32)
    message = "runs"
    try:
        network(120)(image)
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    t.record_case("with 120", message, "shapes cannot be multiplied" in message)
    t.assert_equal("with 144: output", tuple(network(144)(image).shape), (1, 10))


@claim(
    FINAL,
    f"{PLACE}.3",
    statement=(
        "Run as printed, the student's program fails because matrix sizes do not match (and only the linear "
        "layer is to be changed)."
    ),
    method="Python's parser on the program with the commas that are printed, and on the one with 144.",
)
def conv_program_runs(t: Experiment) -> None:

    def parses(text: str) -> str:
        try:
            ast.parse(text)
        except SyntaxError as error:
            return f"syntax error in line {error.lineno}"
        return "parses"

    t.assert_equal("the program", parses(PRINTED), "parses")
    t.assert_equal("with nn.Linear(144, 10)", parses(PRINTED.replace("120", "144")), "parses")
    commas = PRINTED.replace(")\n    nn.ReLU", "),\n    nn.ReLU")
    correct = "Two commas are missing after the pooling layers; with them the mismatch of 120 and 144 is what is left."
    t.intended(correct, parses(commas) == "parses")


@claim(
    FINAL,
    f"{PLACE}.4, solution 1",
    statement="A 3 × 3 convolution with 16 input and 10 output channels replaces flattening and the linear layer.",
    method="The linear layer's weights reshaped into the kernel: equal logits on random images.",
)
def conv_instead_of_linear(t: Experiment) -> None:
    net = network(144).double()
    conv = nn.Conv2d(16, 10, 3).double()
    last = net[7].state_dict()
    conv.load_state_dict(last | {"weight": last["weight"].view(10, 16, 3, 3)})
    x = net[:6](t.normal(5, 1, 32, 32))
    a = net[6:](x)
    b = conv(x)
    t.assert_equal("output", tuple(b.shape[1:]), (10, 1, 1))
    t.assert_below("difference of the logits", max_abs_diff(a, b.flatten(1)), 1e-12)


@claim(
    FINAL,
    f"{PLACE}.4, solution 2",
    statement=("A 1 × 1 convolution to 10 channels (3 × 3 × 10) and an average pooling of 3 × 3 also give 1 × 1 × 10."),
    method="Sizes through torch's layers; and how many parameters are left.",
)
def conv_pointwise_head(t: Experiment) -> None:
    x = torch.randn(2, 16, 3, 3, generator=t.generator)
    conv = nn.Conv2d(16, 10, 1)
    y = conv(x)
    t.assert_equal("after the convolution", tuple(y.shape[1:]), (10, 3, 3))
    t.assert_equal("after pooling", tuple(nn.AvgPool2d(3)(y).shape[1:]), (10, 1, 1))
    than = f"{n_parameters(conv)} parameters where the linear layer has {144 * 10 + 10:,}"
    t.note(f"it has {than}: a smaller family, blind to where a feature is")


@claim(
    FINAL,
    f"{PLACE}.1",
    statement="Pooling provides invariance, which makes the network more robust to small variations of the input.",
    method="A single bright entry moved by one place, under max and average pooling of width 4.",
    condition="the variation stays inside one window",
)
def pooling_invariance(t: Experiment) -> None:

    def pooled(place: int) -> tuple[list[float], list[float]]:
        x = torch.zeros(1, 1, 8)
        x[0, 0, place] = 1.0
        return nn.MaxPool1d(4)(x).flatten().tolist(), nn.AvgPool1d(4)(x).flatten().tolist()

    t.record_case("moved from 1 to 2", f"{pooled(1)} → {pooled(2)}", pooled(1) == pooled(2))
    t.record_case(
        "moved from 3 to 4, across the edge", f"{pooled(3)} → {pooled(4)}", pooled(3) == pooled(4), in_scope=False
    )


@claim(
    FINAL,
    f"{PLACE}.1",
    statement="Pooling increases the receptive field of deeper layers.",
    method="Inputs with a gradient at one unit after Conv-2 of the exam's network, with pooling of 4 and without.",
)
def pooling_receptive_field(t: Experiment) -> None:
    sides = [field_after_conv2(pool) for pool in (1, 4)]
    t.record_case(
        "side of the field: without, with pooling", join_numbers(sides, ""), sides[0] < sides[1] == 5 + 3 + 3 * 4
    )


def field_after_conv2(pool: int) -> int:
    """Return the side of the receptive field of one unit after Conv-2, with average pooling of this width before it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 64, 64, generator=generator, requires_grad=True)
    y = nn.Sequential(nn.Conv2d(1, 8, 5), nn.AvgPool2d(pool), nn.Conv2d(8, 16, 4))(x)
    return int((jacobian_row(y[0, 0, 1, 1], x)[0, 0].abs().sum(0) > 0).sum())


@claim(
    FINAL,
    f"{PLACE}.1",
    statement="Max pooling keeps the most prominent value of a patch, average pooling smooths all of them.",
    method="The patch (0, 0, 0, 8): both poolings; then with a second channel; then the patch (0, 1, 0, −8).",
    condition=(
        "prominent means large and positive, as after a ReLU; a strong negative response is lost, and in this exam's "
        "network the pooling comes before the ReLU"
    ),
)
def pooling_max_average(t: Experiment) -> None:
    x = torch.tensor([[[0.0, 0.0, 0.0, 8.0]]])
    top, mean = nn.MaxPool1d(4)(x).item(), nn.AvgPool1d(4)(x).item()
    t.record_case("max, average", f"{top:g}, {mean:g}", top == 8.0 and mean == 2.0)
    both = nn.AvgPool1d(4)(torch.cat([x, -x], 1)).flatten().tolist()
    t.assert_equal("two channels, averaged", both, [mean, -mean])
    signed = torch.tensor([[[0.0, 1.0, 0.0, -8.0]]])
    t.assert_equal("maximum of (0, 1, 0, −8)", nn.MaxPool1d(4)(signed).item(), -8.0, "{:g}", in_scope=False)


@claim(
    HOMEWORK,
    "1.2b and 1.5a",
    statement="Filters extract local patterns, attention heads can attend to all positions.",
    method="Inputs with a gradient at the middle one of 9 outputs: a convolution of width 3, and self-attention.",
)
def filters_local_heads_global(t: Experiment) -> None:
    x = t.normal(1, 9, 4).requires_grad_()
    conv = nn.Conv1d(4, 4, 3, padding=1).double()
    mha = MultiHeadAttention(4, 2).double()
    for name, out, expected in (("convolution", conv(x.mT).mT, [4, 5, 6]), ("attention", mha(x), list(range(1, 10)))):
        reached = jacobian_row(out[0, 4].sum(), x)[0].abs().sum(1) > 0
        t.assert_equal(f"{name}: inputs of output 5", reached.nonzero().flatten().add(1).tolist(), expected)


@claim(
    HOMEWORK,
    "1.5a and 1.5d",
    statement="Convolutional networks have translation equivariance built in.",
    method=(
        "An image shifted by one pixel through a convolution (away from the border), through one with stride "
        "2, and through this project's ConvNet down to its logits."
    ),
    condition="the stride is 1 and the border is far; striding, pooling and the flattened head break it",
)
def convolution_equivariance(t: Experiment) -> None:
    x = torch.zeros(1, 1, 32, 32)
    x[..., 10:16, 10:16] = torch.randn(6, 6, generator=t.generator)
    moved = x.roll(1, -1)

    def gap(conv: nn.Module, shift: int) -> float:
        return max_abs_diff(conv(x).roll(shift, -1)[..., 4:-4], conv(moved)[..., 4:-4])

    conv = nn.Conv2d(1, 3, 5, padding=2)
    strided = nn.Conv2d(1, 3, 5, padding=2, stride=2)
    t.assert_below("stride 1, shift 1", gap(conv, 1), 1e-6)
    t.assert_below("stride 2, shift 1", min(gap(strided, shift) for shift in (0, 1)), 1e-6, "{:.2f}", in_scope=False)
    net = ConvNet(ConvNetConfig()).eval()
    t.assert_below(
        "logits of the whole network, shift 1", max_abs_diff(net(x), net(moved)), 1e-6, "{:.3f}", in_scope=False
    )
