"""Vision Transformers: patches as a convolution, the [CLS] token, positions, and what they know about space."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from clearhead.course.claims.experiment import Experiment
from clearhead.course.claims.numerics import jacobian_row, join_numbers, max_abs_diff
from clearhead.course.claims.registry import HOMEWORK, claim
from clearhead.hub import load
from clearhead.models import VisionConfig, VisionTransformer
from clearhead.nn import PatchEmbedding

# Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, table 2: accuracies after pre-training on JFT-300M, and of
# the best convolutional networks before it. Noisy Student is reported for the first two data sets only.
TABLE_2 = {
    "ImageNet": {"ViT-H/14": 88.55, "ViT-L/16": 87.76, "BiT-L": 87.54, "Noisy Student": 88.5},
    "ImageNet ReaL": {"ViT-H/14": 90.72, "ViT-L/16": 90.54, "BiT-L": 90.54, "Noisy Student": 90.55},
    "CIFAR-10": {"ViT-H/14": 99.50, "ViT-L/16": 99.42, "BiT-L": 99.37},
    "CIFAR-100": {"ViT-H/14": 94.55, "ViT-L/16": 93.90, "BiT-L": 93.51},
    "Oxford-IIIT Pets": {"ViT-H/14": 97.56, "ViT-L/16": 97.32, "BiT-L": 96.62},
    "Oxford Flowers-102": {"ViT-H/14": 99.68, "ViT-L/16": 99.74, "BiT-L": 99.63},
    "VTAB": {"ViT-H/14": 77.63, "ViT-L/16": 76.28, "BiT-L": 76.29},
}
# Pictures of each set, in thousands (the same paper, section 4.1).
PICTURES = {"ImageNet-1k": 1_300, "ImageNet-21k": 14_000, "JFT-300M": 303_000}


SMALL = VisionConfig(
    image_size=(8, 12), patch_size=4, n_channels=1, n_classes=5, n_layers=2, d_model=8, n_heads=2, d_ff=16
)


def small(seed: int | None = None, **choices: object) -> VisionTransformer:
    """Return a model for images of 2 × 3 patches of 4 × 4 pixels; the seed determines its parameters."""
    if seed is not None:
        torch.manual_seed(seed)
    return VisionTransformer(SMALL.replace(**choices)).double().eval()


def patches_moved(image: Tensor, order: list[int]) -> Tensor:
    """Return the images with permuted patches."""
    rows = image.reshape(-1, 1, 2, 4, 3, 4).transpose(3, 4)  # row of patches, column, row of pixels, column
    return rows.flatten(2, 3)[:, :, order].unflatten(2, (2, 3)).transpose(3, 4).reshape(image.shape)


@claim(
    HOMEWORK,
    "1.5a",
    statement="The linear embedding of 16 × 16 patches is a convolution with kernel 16 and stride 16.",
    method="PatchEmbedding against nn.Conv2d with the same weights, 3 channels, 48 × 32 pixels.",
)
def patches_as_convolution(t: Experiment) -> None:
    patches = PatchEmbedding(3, 16, 11).double()
    images = t.normal(2, 3, 48, 32)
    conv = patches.as_convolution()
    t.record_case(
        "kernel and stride", f"{conv.kernel_size}, {conv.stride}", conv.kernel_size == conv.stride == (16, 16)
    )
    t.assert_below("largest difference", max_abs_diff(patches(images), conv(images).flatten(2).mT), 1e-12)


@claim(
    HOMEWORK,
    "1.5c",
    statement="By self-attention [CLS] gathers information from the whole image.",
    method="Gradient of the logits, read at [CLS] alone, in every patch of a small VisionTransformer.",
)
def cls_sees_all(t: Experiment) -> None:
    image = t.normal(1, 1, 8, 12).requires_grad_()
    gradient = jacobian_row(small(t.seed)(image).square().sum(), image)
    by_patch = gradient[0, 0].abs().reshape(2, 4, 3, 4).sum((1, 3))
    t.assert_above("six patches: smallest gradient", by_patch.min(), 0)


@claim(
    HOMEWORK,
    "1.5c",
    statement="The sequence is [CLS] and N patches, and positions are added to all N + 1 of them.",
    method="Rows of the learned positions of a model with a 2 × 3 grid.",
)
def cls_position(t: Experiment) -> None:
    rows = {tuple(p.shape) for name, p in small(t.seed).named_parameters() if "positions" in name}
    result_text = " and ".join(str(row) for row in rows)
    t.record_case("2 × 3 patches: shape of the positions", result_text, rows == {(2 * 3 + 1, 8)})


@claim(
    HOMEWORK,
    "1.5b.2",
    statement=(
        "The positional embeddings of a vision Transformer encode row and column, though its patches are one sequence."
    ),
    method=(
        "Mean cosine of two embeddings by their distance on the 8 × 8 grid, in this project's digits-vit as "
        "it was trained, and in the same model as it begins (three draws)."
    ),
    condition="training has put it there; the table begins without rows or columns",
)
def vit_2d_positions(t: Experiment) -> None:
    model = load("digits-vit", dtype=None)
    for draw in range(4):
        table = next(p for name, p in model.named_parameters() if "positions" in name).detach().double()
        unit = nn.functional.normalize(table, dim=1)
        row = torch.arange(64) // 8
        column = torch.arange(64) % 8
        distance = (row[:, None] - row).abs() + (column[:, None] - column).abs()
        near = [(unit @ unit.T)[distance == d].mean().item() for d in (1, 2, 4)]
        case_name = f"{f'as it begins, draw {draw}' if draw else 'trained'}: distance 1, 2, 4"
        t.record_case(case_name, join_numbers(near, ".2f"), near[0] > near[1] + 0.1 > near[2] + 0.2, in_scope=not draw)
        model = model.config.build()


@claim(
    HOMEWORK,
    "1.5a",
    statement=(
        "A vision Transformer has no built-in spatial bias; it learns spatial relations by self-attention "
        "over the patches alone."
    ),
    method=(
        "A fixed rearrangement of the image is undone by rearranging the learned positions (patches moved), "
        "or it is not (pixels moved between patches)."
    ),
    condition="it refers to relations between patches; which pixels share a patch is built in",
)
def no_spatial_bias(t: Experiment) -> None:
    model = small(t.seed)
    other = small(t.seed)
    image = t.normal(3, 1, 8, 12)
    order = [4, 0, 5, 2, 1, 3]
    table = next(p for name, p in other.named_parameters() if "positions" in name)
    with torch.no_grad():
        table[1:] = table[1:][order].clone()
    case_name = "patches moved, positions moved with them: logits"
    t.assert_below(case_name, max_abs_diff(model(image), other(patches_moved(image, order))), 1e-12, "differ by {:.1e}")
    # Two neighbors of one patch may be told apart by one linear map; pixels of two patches may not.
    swapped = image.clone()
    swapped[..., 0, 0], swapped[..., 0, 4] = image[..., 0, 4], image[..., 0, 0]
    changed = int(((model.embedding(image) - model.embedding(swapped)).abs().amax((0, 2)) > 1e-9).sum())
    case_name = "two pixels of different patches exchanged: patch vectors changed"
    t.assert_equal(case_name, changed, 0, "{}; no rearrangement of positions undoes it", in_scope=False)


@claim(
    HOMEWORK,
    "1.5d.3",
    statement=(
        "ViT-H/14 and ViT-L/16, pre-trained on JFT-300M, outperform BiT and Noisy Student on multiple benchmarks."
    ),
    method=(
        "The accuracies of Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, table 2: for each pair of models, "
        "the benchmarks on which the vision Transformer is ahead. Multiple means two or more."
    ),
    condition="ViT-L/16 is compared with BiT: it is ahead of Noisy Student on neither of the two benchmarks reported",
)
def vit_beats_convolution(t: Experiment) -> None:
    for vision, convolutional in product(("ViT-H/14", "ViT-L/16"), ("BiT-L", "Noisy Student")):
        results = [scores for scores in TABLE_2.values() if convolutional in scores]
        ahead = sum(scores[vision] > scores[convolutional] for scores in results)
        in_scope = (vision, convolutional) != ("ViT-L/16", "Noisy Student")
        case_name = f"{vision} against {convolutional}: ahead on"
        t.record_case(case_name, f"{ahead} of {len(results)} benchmarks", ahead >= 2, in_scope=in_scope)


@claim(
    HOMEWORK,
    "1.5d.1, example",
    statement=(
        "On small data sets such as ImageNet-1k with 1.3 million pictures, ViT-B/32 performs much worse than ResNet50 "
        "on small subsets of 9 million pictures."
    ),
    method=(
        "Can a set have a subset of this size? The sizes are those of Dosovitskiy et al. (2021), An Image is Worth "
        "16x16 Words, section 4.1; the subsets are described in section 4.3."
    ),
)
def subset_of_imagenet(t: Experiment) -> None:
    subset = 9_000
    sizes = f"{subset:,} of {PICTURES['ImageNet-1k']:,} thousand pictures"
    t.record_case("a subset of ImageNet-1k", sizes, subset <= PICTURES["ImageNet-1k"])
    t.correction(
        "The 9 million pictures are a random subset of JFT-300M; on subsets of 90 million and more the paper finds "
        "ViT-B/32 ahead.",
        subset <= PICTURES["JFT-300M"],
    )
