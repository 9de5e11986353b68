"""Tests of the embeddings: lookup against indexing, tying, and the patch projection against a convolution."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.errors import ConfigError, DtypeError, ShapeError
from clearhead.nn import PatchEmbedding, TokenEmbedding

# -------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_token_embedding_returns_rows_of_the_weight(dtype):
    embedding = TokenEmbedding(11, 5)
    ids = torch.randint(11, (2, 3), dtype=dtype)
    assert torch.equal(embedding(ids), embedding.weight[ids.long()])


def test_scaled_token_embedding_multiplies_rows_by_sqrt_of_d_model():
    embedding = TokenEmbedding(11, 5, scaled=True).double()
    ids = torch.tensor([[0, 10, 7]])
    torch.testing.assert_close(embedding(ids), embedding.weight[ids] * math.sqrt(5))


def test_tied_logits_equal_product_with_unscaled_rows():
    embedding = TokenEmbedding(11, 5, scaled=True).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = torch.stack([(x * row).sum(-1) for row in embedding.weight], dim=-1)
    torch.testing.assert_close(embedding.logits(x), expected)


def test_tied_weight_accumulates_gradients_of_input_and_output():
    embedding = TokenEmbedding(7, 3).double()
    ids, x = torch.tensor([4]), torch.randn(1, 3, dtype=torch.float64)
    (embedding.logits(x)[0, 2] + embedding(ids).sum()).backward()
    expected = torch.zeros(7, 3, dtype=torch.float64)
    expected[2] += x[0]
    expected[4] += 1
    torch.testing.assert_close(embedding.weight.grad, expected)
    assert list(embedding.state_dict()) == ["weight"]


def test_initial_token_embedding_has_rows_of_unit_norm():
    weight = TokenEmbedding(401, 101).weight
    assert abs(weight.var().item() * 101 - 1) < 5 * math.sqrt(2 / weight.numel())


@pytest.mark.parametrize(("token_id", "value"), [(11, "11"), (-1, "-1"), (10**12, "1000000000000")])
def test_token_embedding_with_id_out_of_range_raises(token_id, value):
    with pytest.raises(ShapeError, match=rf"ids contain {value}, but the vocabulary has 11 tokens; expected 0 … 10"):
        TokenEmbedding(11, 5)(torch.tensor([[3, token_id, 0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_token_embedding_with_wrong_id_dtype_raises(unchecked, dtype):
    with pytest.raises(DtypeError, match=rf"ids are {dtype}; expected torch.int64.*`\.long\(\)`"):
        TokenEmbedding(11, 5)(torch.zeros(2, 3, dtype=dtype))


def test_id_range_check_is_skipped_on_meta_and_fake_tensors():
    """On other devices and fake tensors nothing is read back; meta tensors would raise if it were."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    embedding = TokenEmbedding(11, 5)
    assert embedding.to("meta")(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, 5)
    with FakeTensorMode():
        assert TokenEmbedding(11, 5)(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 5)


def test_token_embedding_of_empty_ids_is_empty():
    assert TokenEmbedding(11, 5)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 5)


@pytest.mark.parametrize(
    ("args", "message"),
    [((0, 5), "vocab_size is 0; expected a whole"), ((11, True), "d_model is True; expected a whole")],
)
def test_token_embedding_with_invalid_size_raises(args, message):
    with pytest.raises(ConfigError, match=message):
        TokenEmbedding(*args)


# ------------------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "patch", "rows", "columns"), [(3, 5, 2, 7), (1, 7, 3, 2), (2, 1, 3, 5)])
def test_patch_embedding_equals_strided_convolution(channels, patch, rows, columns, bias):
    embedding = PatchEmbedding(channels, patch, 11, bias=bias).double()
    images = torch.randn(2, channels, rows * patch, columns * patch, dtype=torch.float64)
    convolution = embedding.as_convolution()
    assert (convolution.kernel_size, convolution.stride) == ((patch, patch), (patch, patch))
    expected = convolution(images).flatten(2).transpose(1, 2)  # (B, M, rows, columns) to (B, N, M)
    torch.testing.assert_close(embedding(images), expected, rtol=0, atol=1e-13)


def test_patch_embedding_gradients_equal_those_of_convolution():
    embedding = PatchEmbedding(2, 3, 5).double()
    convolution = embedding.as_convolution()
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    direction = torch.randn(2, 6, 5, dtype=torch.float64)
    (embedding(images) * direction).sum().backward()
    (convolution(images).flatten(2).transpose(1, 2) * direction).sum().backward()
    torch.testing.assert_close(embedding.projection.weight.grad.view(5, 2, 3, 3), convolution.weight.grad)
    torch.testing.assert_close(embedding.projection.bias.grad, convolution.bias.grad)


def test_as_convolution_shares_parameters():
    embedding = PatchEmbedding(2, 3, 5)
    convolution = embedding.as_convolution()
    with torch.no_grad():
        embedding.projection.weight.fill_(7)
        convolution.bias.fill_(3)
    assert (convolution.weight == 7).all()
    assert (embedding.projection.bias == 3).all()
    assert not any(p.is_meta for p in convolution.parameters())


def test_patches_are_ordered_by_row_with_channels_first():
    image = torch.arange(2 * 4 * 6.0).view(1, 2, 4, 6)
    patches = PatchEmbedding(2, 2, 3).patches(image)
    assert patches.shape == (1, 6, 8)
    assert patches[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]  # top row, second column
    assert patches[0, 3].tolist() == [12, 13, 18, 19, 36, 37, 42, 43]  # second row, first column


def test_patch_embedding_of_empty_batch_is_empty():
    assert PatchEmbedding(2, 3, 5)(torch.zeros(0, 2, 6, 9)).shape == (0, 6, 5)


@pytest.mark.parametrize(("height", "width"), [(6, 10), (7, 9), (2, 3), (0, 3)])
def test_patch_embedding_with_indivisible_image_size_raises(height, width):
    with pytest.raises(ShapeError, match=f"image is {height} × {width} pixels; expected multiples of the patch size 3"):
        PatchEmbedding(2, 3, 5)(torch.zeros(1, 2, height, width))


def test_patch_embedding_with_wrong_shape_or_dtype_raises(unchecked):
    embedding = PatchEmbedding(2, 3, 5)
    with pytest.raises(ShapeError, match=r"images have shape \(1, 3, 6, 9\); expected \(B, 2, height, width\)"):
        embedding(torch.zeros(1, 3, 6, 9))
    with pytest.raises(ShapeError, match=r"images have shape \(2, 6, 9\)"):
        embedding(torch.zeros(2, 6, 9))
    with pytest.raises(DtypeError, match=r"images are torch.uint8; expected floating point.*images.float\(\) / 255"):
        embedding(torch.zeros(1, 2, 6, 9, dtype=torch.uint8))


@pytest.mark.compiled
def test_embeddings_compile_to_a_full_graph():
    tokens, patches = TokenEmbedding(11, 5, scaled=True), PatchEmbedding(2, 3, 5)
    ids, images = torch.randint(11, (2, 3)), torch.randn(2, 2, 6, 9)
    torch.testing.assert_close(torch.compile(tokens, fullgraph=True, backend="aot_eager")(ids), tokens(ids))
    torch.testing.assert_close(torch.compile(patches, fullgraph=True, backend="aot_eager")(images), patches(images))
