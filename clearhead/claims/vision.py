"""Vision Transformers: patches as a convolution, the [CLS] token, positions, and what they know about space."""

from __future__ import annotations

import torch
from torch import nn

from clearhead.claims.ledger import Trial, claim
from clearhead.claims.sources import HOMEWORK
from clearhead.layers import PatchEmbedding
from clearhead.models import VisionConfig, VisionTransformer
from clearhead.pretrained import load_model


def small(generator_seed: int) -> VisionTransformer:
    torch.manual_seed(generator_seed)
    config = VisionConfig(
        image_size=(8, 12), patch_size=4, n_classes=5, n_layers=2, n_channels=1, d_model=8, n_heads=2, d_ff=16
    )
    return VisionTransformer(config).double().eval()


@claim(
    "patches-as-convolution",
    HOMEWORK,
    "1.5a",
    "The linear embedding of 16 × 16 patches is a convolution with kernel 16 and stride 16.",
    method="PatchEmbedding against nn.Conv2d with the same weights, 3 channels, 48 × 32 pixels.",
)
def patches_as_convolution(t: Trial) -> None:
    patches = PatchEmbedding(3, 16, 11).double()
    images = torch.randn(2, 3, 48, 32, generator=t.generator, dtype=torch.float64)
    conv = patches.as_convolution()
    t.case("kernel and stride", f"{conv.kernel_size}, {conv.stride}", conv.kernel_size == conv.stride == (16, 16))
    gap = (patches(images) - conv(images).flatten(2).mT).abs().max().item()
    t.case("largest difference", f"{gap:.1e}", gap < 1e-12)


@claim(
    "cls-sees-all",
    HOMEWORK,
    "1.5c",
    "By self-attention [CLS] gathers information from the whole image.",
    method="Gradient of the logits, read at [CLS] alone, in every patch of a small VisionTransformer.",
)
def cls_sees_all(t: Trial) -> None:
    image = torch.randn(1, 1, 8, 12, generator=t.generator, dtype=torch.float64, requires_grad=True)
    logits = small(t.seed)(image)
    (g,) = torch.autograd.grad(logits.square().sum(), image)
    by_patch = g[0, 0].abs().reshape(2, 4, 3, 4).sum((1, 3))
    t.case("six patches: smallest gradient", f"{by_patch.min():.1e}", by_patch.min() > 0)


@claim(
    "cls-position",
    HOMEWORK,
    "1.5c",
    "The sequence is [CLS] and N patches, and positions are added to all N + 1 of them.",
    method="Rows of the learned positions of a model with a 2 × 3 grid.",
)
def cls_position(t: Trial) -> None:
    rows = {tuple(p.shape) for name, p in small(t.seed).named_parameters() if "positions" in name}
    shown = " and ".join(str(row) for row in rows)
    t.case("2 × 3 patches: shape of the positions", shown, rows == {(2 * 3 + 1, 8)})


@claim(
    "vit-2d-positions",
    HOMEWORK,
    "1.5b.2",
    "The positional embeddings of a vision Transformer encode row and column, though its patches are one sequence.",
    method="Mean cosine of two embeddings by their distance on the 8 × 8 grid, in this project's digits-vit as it was "
    "trained, and in the same model as it begins (three draws).",
    when="training has put it there; the table begins without rows or columns",
)
def vit_2d_positions(t: Trial) -> None:
    model = load_model("digits-vit")
    for draw in range(4):
        table = next(p for name, p in model.named_parameters() if "positions" in name).detach().double()
        unit = nn.functional.normalize(table, dim=1)
        row, column = torch.arange(64) // 8, torch.arange(64) % 8
        apart = (row[:, None] - row).abs() + (column[:, None] - column).abs()
        near = [(unit @ unit.T)[apart == d].mean().item() for d in (1, 2, 4)]
        name = f"as it begins, draw {draw}" if draw else "trained"
        shown = ", ".join(f"{x:.2f}" for x in near)
        t.case(f"{name}: distance 1, 2, 4", shown, near[0] > near[1] + 0.1 > near[2] + 0.2, inside=not draw)
        model = model.config.build()


@claim(
    "no-spatial-bias",
    HOMEWORK,
    "1.5a",
    "A vision Transformer has no built-in spatial bias; it learns spatial relations by "
    "self-attention over the patches alone.",
    method="A fixed rearrangement of the image is undone by rearranging the learned positions (patches moved), or it "
    "is not (pixels moved between patches).",
    when="it is said of relations between patches; which pixels share a patch is built in",
)
def no_spatial_bias(t: Trial) -> None:
    model, other = small(t.seed), small(t.seed)
    image = torch.randn(3, 1, 8, 12, generator=t.generator, dtype=torch.float64)
    cut = image.reshape(3, 1, 2, 4, 3, 4).permute(0, 1, 2, 4, 3, 5).reshape(3, 1, 6, 4, 4)
    order = [4, 0, 5, 2, 1, 3]
    moved = cut[:, :, order].reshape(3, 1, 2, 3, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(3, 1, 8, 12)
    table = next(p for name, p in other.named_parameters() if "positions" in name)
    with torch.no_grad():
        table[1:] = table[1:][order].clone()
    gap = (model(image) - other(moved)).abs().max().item()
    t.case("patches moved, positions moved with them: logits", f"differ by {gap:.1e}", gap < 1e-12)
    # Two neighbours of one patch may be told apart by one linear map; pixels of two patches may not.
    embed = small(t.seed).embedding
    swapped = image.clone()
    swapped[..., 0, 0], swapped[..., 0, 4] = image[..., 0, 4], image[..., 0, 0]
    a, b = embed(image), embed(swapped)
    changed = int(((a - b).abs().amax((0, 2)) > 1e-9).sum())
    t.case(
        "two pixels of different patches exchanged: patch vectors changed",
        f"{changed}; no rearrangement of positions undoes it",
        changed == 0,
        inside=False,
    )
