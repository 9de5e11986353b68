"""Tests that compare the digit network with the exam's answers, torch's layers and its other heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.config import Config
from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.models.baselines.convnet import (
    ConvHead,
    ConvNet,
    ConvNetConfig,
    LinearHead,
    PointwiseHead,
    conv_output,
    shapes,
)
from tests.support.rounding import assert_equal_up_to_rounding

# All sizes differ, height and width too, so that a transposition changes the result.
ODD = {
    "image_size": (29, 37),
    "n_channels": 3,
    "n_classes": 11,
    "filters": (5, 7),
    "kernels": (4, 3),
    "paddings": (2, 1),
    "pools": (3, 2),
}


def n_weights(module):
    return sum(p.numel() for p in module.parameters())


def the_exam_network():
    """The network of Part 3 Problem 1 question 3, repaired as its solution says, written with torch alone."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=1, padding=0),
        nn.AvgPool2d(4, 4, 0),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, stride=1, padding=1),
        nn.AvgPool2d(2, 2, 0),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )


# ---------------------------------------------------------------------- sizes by formula


def test_conv_output_matches_exam_answer():
    assert conv_output((128, 128), (3, 5), stride=(1, 3)) == (126, 42)
    assert conv_output(32, 5) == 28
    assert conv_output(28, 4, stride=4) == 7
    assert conv_output(7, 4, padding=1) == 6
    assert conv_output((6, 6), 2, 2) == (3, 3)


@given(
    size=st.integers(1, 23),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 5),
    padding=st.integers(0, 3),
)
def test_conv_output_matches_torch_convolution(size, kernel, stride, padding):
    if kernel > size + 2 * padding:
        with pytest.raises(ShapeError, match="does not fit"):
            conv_output(size, kernel, stride, padding)
        return
    real = F.conv1d(torch.zeros(1, 1, size), torch.zeros(1, 1, kernel), stride=stride, padding=padding)
    assert conv_output(size, kernel, stride, padding) == real.shape[-1]


def test_conv_output_with_invalid_sizes_raises():
    with pytest.raises(ShapeError, match=r"a kernel of 5 does not fit on 3 values padded by 0; give at least 5"):
        conv_output(3, 5)
    with pytest.raises(ShapeError, match="got size 3, kernel 2, stride 0"):
        conv_output(3, 2, 0)
    with pytest.raises(ShapeError, match="no negative padding"):
        conv_output(3, 2, 1, -1)
    with pytest.raises(ShapeError, match="one number per axis"):
        conv_output((3, 4), (1, 1, 1))


def test_shapes_of_exam_network_match_its_answer():
    assert shapes(ConvNetConfig()) == {
        "conv1": (8, 28, 28),
        "pool1": (8, 7, 7),
        "conv2": (16, 6, 6),
        "pool2": (16, 3, 3),
        "flatten": (144,),
        "linear": (10,),
    }
    assert shapes(ConvNetConfig(head=ConvHead()))["conv"] == (10, 1, 1)
    assert shapes(ConvNetConfig(head=PointwiseHead()))["conv"] == (10, 3, 3)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (LinearHead(), None),
        (ConvHead(), None),
        (ConvHead(), (41, 53)),
        (PointwiseHead(), None),
        (PointwiseHead(), (41, 53)),
    ],
)
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["exam", "odd"])
def test_shapes_match_tensors_of_forward_pass(head, size, sizes):
    config = ConvNetConfig(**sizes, head=head)
    model = ConvNet(config)
    visible = {}
    for name, layer in model.features.named_children():
        layer.register_forward_hook(lambda _, __, out, name=name: visible.update({name: tuple(out.shape[1:])}))
    model.head.register_forward_pre_hook(lambda _, inputs: visible.update({"flatten": tuple(inputs[0].shape[1:])}))
    model.head.register_forward_hook(lambda _, __, out: visible.update({"conv": tuple(out.shape[1:])}))
    out = model(torch.randn(2, config.n_channels, *(size or config.image_size)))
    visible["linear"] = visible["average"] = tuple(out.shape[1:])
    table = shapes(config, size)
    assert len(table) == 2 * len(config.filters) + 2
    assert table == {name: visible[name] for name in table}


# ---------------------------------------------------------------------- the network


def test_parameter_count_matches_exam_answer():
    model = ConvNet(ConvNetConfig())
    assert n_weights(model.features.conv1) == 8 * ((5 * 5 * 1) + 1) == 208
    assert n_weights(model.features.conv2) == 16 * ((4 * 4 * 8) + 1) == 2064
    assert n_weights(model.features.pool1) == n_weights(model.features.pool2) == 0
    assert n_weights(model.head) == 1450
    assert n_weights(model) == n_weights(the_exam_network()) == 3722
    assert n_weights(ConvNet(ConvNetConfig(head=ConvHead()))) == 3722
    assert n_weights(ConvNet(ConvNetConfig(head=PointwiseHead()))) == 208 + 2064 + 10 * (16 + 1)


def test_forward_matches_exam_network_in_torch():
    reference, model = the_exam_network(), ConvNet(ConvNetConfig())
    model.load_state_dict(dict(zip(model.state_dict(), reference.state_dict().values(), strict=True)))
    images = torch.randn(7, 1, 32, 32)
    assert_equal_up_to_rounding(model(images), reference(images))


def test_pointwise_head_matches_second_exam_answer():
    model = ConvNet(ConvNetConfig(head=PointwiseHead())).double()
    images = torch.randn(3, 1, 32, 32, dtype=torch.float64)
    layer = nn.Conv2d(16, 10, 1).double()
    layer.load_state_dict(model.head.state_dict())
    expected = nn.AvgPool2d(3)(layer(model.features(images)))
    assert expected.shape == (3, 10, 1, 1)
    torch.testing.assert_close(model(images), expected.flatten(1))


def test_all_convolution_has_outputs_and_gradients_of_linear_head():
    linear = ConvNet(ConvNetConfig(**ODD)).double()
    convolution = linear.all_convolution()
    assert isinstance(convolution.head, nn.Conv2d)
    assert convolution.config.head == ConvHead()
    assert n_weights(convolution) == n_weights(linear)
    images = torch.randn(2, 3, 29, 37, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(convolution(images), linear(images))
    upstream = torch.randn(2, 11, dtype=torch.float64)
    gradient, reference = (torch.autograd.grad(m(images), images, upstream)[0] for m in (convolution, linear))
    torch.testing.assert_close(gradient, reference)


@pytest.mark.fixed_memory
def test_all_convolution_shares_parameters_but_not_gradients():
    linear = ConvNet(ConvNetConfig())
    convolution = linear.all_convolution()
    for parameter, reference in zip(linear.parameters(), convolution.parameters(), strict=True):
        assert parameter.data_ptr() == reference.data_ptr()
    images, labels = torch.randn(3, 1, 32, 32), torch.tensor([2, 3, 5])
    optimiser = torch.optim.SGD(convolution.parameters(), lr=0.1)
    before = linear(images)
    F.cross_entropy(convolution(images), labels).backward()
    optimiser.step()
    assert all(p.grad is None for p in linear.parameters())
    assert not torch.allclose(linear(images), before)
    torch.testing.assert_close(linear(images), convolution(images))


def test_all_convolution_on_larger_image_matches_network_on_crops():
    # 8 = 4 · 2 pixels are one step of the last map. Without padding, which would add a border around each piece,
    # every place of the map is the linear network on a piece of the image.
    config = ConvNetConfig(paddings=(0, 0), image_size=(36, 36))
    linear = ConvNet(config).double()
    convolution = linear.all_convolution()
    image = torch.randn(2, 1, 52, 44, dtype=torch.float64)
    logits = convolution.logit_map(image)
    assert logits.shape == (2, 10, 3, 2)
    for row in range(3):
        for col in range(2):
            piece = image[..., 8 * row : 8 * row + 36, 8 * col : 8 * col + 36]
            torch.testing.assert_close(logits[..., row, col], linear(piece))
    torch.testing.assert_close(convolution(image), logits.mean((2, 3)))


def test_logit_map_at_configured_size_has_one_position():
    images = torch.randn(3, 1, 32, 32)
    for head in (LinearHead(), ConvHead()):
        model = ConvNet(ConvNetConfig(head=head))
        assert model.logit_map(images).shape == (3, 10, 1, 1)
        assert_equal_up_to_rounding(model.logit_map(images)[..., 0, 0], model(images))


def test_gradients_pass_gradcheck():
    model = ConvNet(
        ConvNetConfig(image_size=(7, 5), filters=(2,), kernels=(3,), paddings=(1,), pools=(2,), n_classes=3)
    ).double()
    images = torch.randn(2, 1, 7, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, images)


# ---------------------------------------------------------------------- errors and storage


@pytest.mark.bad_input
def test_invalid_images_raise():
    model = ConvNet(ConvNetConfig())
    with pytest.raises(ShapeError, match=r"got an image of 28×28, expected 32×32.*all_convolution\(\)"):
        model(torch.randn(2, 1, 28, 28))
    with pytest.raises(ShapeError, match=r"got an image of 40×32, expected 32×32"):
        model(torch.randn(2, 1, 40, 32))
    with pytest.raises(ShapeError, match=r"shape \(2, 3, 32, 32\), expected \(batch, 1, height, width\)"):
        model(torch.randn(2, 3, 32, 32))
    with pytest.raises(ShapeError, match=r"images\[:, None\]"):
        model(torch.randn(2, 32, 32))
    with pytest.raises(DtypeError, match=r"torch.uint8, expected floating point.*/ 255"):
        model(torch.zeros(2, 1, 32, 32, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"too small for layer conv, which is given 2×2: a kernel of 3"):
        model.all_convolution()(torch.randn(2, 1, 24, 24))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": (8, 16, 32)}, "the same number in each"),
        ({"filters": (), "kernels": (), "paddings": (), "pools": ()}, "the same number in each"),
        ({"pools": (4, 0)}, r"pools is \(4, 0\); expected values, each a whole number of at least 1"),
        ({"image_size": (8, 32)}, "too small for layer conv2"),
        ({"n_classes": 0}, "n_classes is 0; expected a whole number of at least 1"),
        ({"head": "linear"}, "head"),
    ],
    ids=str,
)
def test_invalid_configuration_raises_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        ConvNetConfig(**options)


@pytest.mark.bad_input
def test_all_convolution_without_linear_layer_raises():
    with pytest.raises(ConfigError, match=r"no linear layer to replace"):
        ConvNet(ConvNetConfig(head=PointwiseHead())).all_convolution()


@pytest.mark.parametrize("head", [LinearHead(), ConvHead(), PointwiseHead()])
def test_config_round_trips_through_dict_and_toml(head):
    config = ConvNetConfig(**ODD, head=head)
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_toml(config.to_toml()) == config
    assert isinstance(config.build(), ConvNet)


@pytest.mark.compiled
@pytest.mark.parametrize("head", [LinearHead(), ConvHead(), PointwiseHead()])
def test_compiled_full_graph_matches_eager(head):
    torch.compiler.reset()
    model, images = ConvNet(ConvNetConfig(head=head)), torch.randn(3, 1, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))
