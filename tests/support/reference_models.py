"""How tests build, save, reload and call reference models of transformers and timm.

Every parameter is moved from its initial value, so that swapped parameters do not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from clearhead.masks import Mask

V, L, H, D, F, T, B = 31, 2, 4, 6, 23, 11, 2
M = H * D  # not a prime, because heads divide it
MAX_LEN = 13


class Pooled(nn.Module):
    """The pooled output of an encoder: one vector per text."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.pool(self.encoder(ids, mask=mask, positions=positions))


class Classified(nn.Module):
    """The class logits of an encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.classify(self.encoder(ids, mask=mask, positions=positions))


class TokenClassified(nn.Module):
    """The class logits of each token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.classify_tokens(self.encoder(ids, mask=mask, positions=positions))


class TokenPredicted(nn.Module):
    """The logits of the vocabulary at each token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        return self.encoder.predict_tokens(self.encoder(ids, mask=mask, positions=positions))


@dataclass(frozen=True)
class Peer:
    """A reference model of transformers: its class, its sizes, and how it is called."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], Tensor] = lambda: torch.randint(0, V, (B, T))
    output: str = "logits"
    # transformers computes rotary angles, sinusoids and RMS norms in float32 for every dtype.
    in_float32: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    comparable: Callable[[nn.Module], nn.Module] = lambda model: model  # wraps clearhead's model for the same output

    pads_source: ClassVar[bool] = True  # texts of different lengths can share a batch

    def example(self) -> tuple[Tensor, ...]:
        """Return the inputs of both models."""
        return (self.inputs(),)

    def build(self) -> nn.Module:
        transformers = pytest.importorskip(
            "transformers", reason="transformers, the reference to compare with, is missing"
        )
        config = getattr(transformers, self.config)(**self.sizes)
        with in_float64():
            return perturbed(getattr(transformers, self.model)(config, **self.options))

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)

    def reload(self, folder: Path) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.model)
        options = self.options
        if "attn_implementation" in self.sizes:
            options = options | {"attn_implementation": self.sizes["attn_implementation"]}
        model, report = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True, **options)
        assert not any(report.values()), report
        return model.eval()

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return getattr(model(inputs), self.output)

    def padded(self, model: nn.Module, inputs: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        """Return the output for texts of different lengths; `is_token` is False for padding."""
        return getattr(model(inputs, attention_mask=is_token[0].long()), self.output)

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        """Return attention weights by the path of clearhead's layer, with @run if a layer runs several times."""
        model.set_attn_implementation("eager")
        return {f"blocks.{i}.attention": w for i, w in enumerate(model(inputs, output_attentions=True).attentions)}

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that an export must reproduce bit for bit."""
        return model.state_dict()

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the gradients by all names in memory; tied parameters have several."""
        parameters = model.named_parameters(remove_duplicate=False)
        return {name: weight.grad for name, weight in parameters if weight.grad is not None}

    def tokens(self) -> int | tuple[int, int] | None:
        """Return the argument `tokens` of `cost`; None for images."""
        example = self.example()[0]
        return example.shape[1] if example.dim() == 2 else None

    def n_parameters(self, model: nn.Module) -> int:
        """Return the number of trained parameters."""
        return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


class Eager(Peer):
    """A model whose other attention implementations omit an option."""

    def build(self) -> nn.Module:
        model = super().build()
        model.set_attn_implementation("eager")
        return model

    def reload(self, folder: Path) -> nn.Module:
        model = super().reload(folder)
        model.set_attn_implementation("eager")
        return model


class Routed(Peer):
    """Its experts are one tensor in memory, and separate tensors in files."""

    prefix: ClassVar[str] = "mlp"  # name of the mixture of experts in files
    parts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def build(self) -> nn.Module:
        model = self._with_eager_experts(super().build())
        for bias in self._selection_biases(model).values():
            bias.normal_()
        return model

    def reload(self, folder: Path) -> nn.Module:
        return self._with_eager_experts(super().reload(folder))

    def _selection_biases(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}

    def n_parameters(self, model: nn.Module) -> int:
        return super().n_parameters(model) + sum(bias.numel() for bias in self._selection_biases(model).values())

    def _with_eager_experts(self, model: nn.Module) -> nn.Module:
        model.set_experts_implementation("eager")  # the other implementations do not support float64
        return model

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        gradients = {name.replace(".mlp.", f".{self.prefix}."): g for name, g in super().gradients(model).items()}
        gate, up, down = self.parts
        for name in [name for name in gradients if ".experts." in name]:
            prefix, _, kind = name.rpartition(".")
            for i, gradient in enumerate(gradients.pop(name)):
                parts = dict(zip((gate, up), gradient.chunk(2), strict=True)) if "up" in kind else {down: gradient}
                gradients |= {f"{prefix}.{i}.{part}.weight": tensor for part, tensor in parts.items()}
        return gradients | {name: torch.zeros_like(bias) for name, bias in self._selection_biases(model).items()}


class MixtralPeer(Routed):
    """Mixtral, with other names in files."""

    prefix: ClassVar[str] = "block_sparse_moe"
    parts: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")


class Experts3D(Peer):
    """A model whose experts are one tensor in memory and in files."""

    def build(self) -> nn.Module:
        return self._eager(super().build())

    def reload(self, folder: Path) -> nn.Module:
        return self._eager(super().reload(folder))

    def _eager(self, model: nn.Module) -> nn.Module:
        model.set_experts_implementation("eager")  # the other implementations do not support float64
        model.set_attn_implementation("eager")  # the others have no attention sinks
        return model


class Answering(Peer):
    """A model that predicts the first and the last token of an answer."""

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return self._stacked(model(inputs))

    def padded(self, model: nn.Module, inputs: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        return self._stacked(model(inputs, attention_mask=is_token[0].long()))

    def _stacked(self, output: Any) -> Tensor:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)


class Choosing(Peer):
    """A model that scores several texts, of which one is to be chosen."""

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs[None]).logits.T


class OneBlock(Peer):
    """ALBERT: one block runs for every layer."""

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        layers = super().weights(model, inputs).values()
        return {f"blocks.0.attention@{i}": weights for i, weights in enumerate(layers)}


class TwoSided(Peer):
    """An encoder-decoder."""

    def build(self) -> nn.Module:
        model = super().build()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        return model

    def example(self) -> tuple[Tensor, ...]:
        return self.inputs(), self.inputs()[:, :7]

    def run(self, model: nn.Module, source: Tensor, target: Tensor, **more: Any) -> Any:
        return getattr(model(source, decoder_input_ids=target), self.output)

    def padded(self, model: nn.Module, source: Tensor, target: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        masks = {"attention_mask": is_token[0].long(), "decoder_attention_mask": is_token[1].long()}
        return getattr(model(source, decoder_input_ids=target, **masks), self.output)

    def weights(self, model: nn.Module, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        for part in (model, model.get_encoder(), model.get_decoder()):  # in T5, each stack has its own configuration
            part.set_attn_implementation("eager")
        out = model(source, decoder_input_ids=target, output_attentions=True)
        attentions = {
            "encoder.blocks.{}.attention": out.encoder_attentions,
            "decoder.blocks.{}.attention": out.decoder_attentions,
            "decoder.blocks.{}.cross_attention": out.cross_attentions,
        }
        return {path.format(i): w for path, layers in attentions.items() for i, w in enumerate(layers)}

    def tokens(self) -> tuple[int, int]:
        source, target = self.example()
        return source.shape[1], target.shape[1]

    def n_parameters(self, model: nn.Module) -> int:
        # In transformers the bias of the logits is a buffer.
        return super().n_parameters(model) + getattr(model, "final_logits_bias", torch.empty(0)).numel()


class Towers(Peer):
    """CLIP: a text encoder and an image encoder."""

    def example(self) -> tuple[Tensor, ...]:
        return self.inputs(), squares()[:1].expand(3, -1, -1, -1) * torch.arange(1, 4).reshape(3, 1, 1, 1)

    def run(self, model: nn.Module, ids: Tensor, images: Tensor) -> Tensor:
        return getattr(model(ids, images), self.output)

    def weights(self, model: nn.Module, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        for part in (model, model.text_model, model.vision_model):
            part.set_attn_implementation("eager")
        out = model(ids, images, output_attentions=True)
        towers = {"text": out.text_model_output, "image": out.vision_model_output}
        return {f"{name}.blocks.{i}.attention": w for name in towers for i, w in enumerate(towers[name].attentions)}

    def tokens(self) -> int:
        return T


class PooledTowers(Towers):
    """SigLIP: an image is pooled by attention."""

    def weights(self, model: nn.Module, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        pooling, inputs = model.vision_model.head.attention, []
        handle = pooling.register_forward_pre_hook(lambda _module, args: inputs.append(args))
        weights = super().weights(model, ids, images)
        handle.remove()
        return weights | {"image.pooler.attention": pooling(*inputs[-1], average_attn_weights=False)[1]}


class FirstToken(Peer):
    """A vision model without a classifier, whose output is its first token."""

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs).last_hidden_state[:, 0]


class WhisperPeer(TwoSided):
    """Whisper: transformers takes frames as (B, features, frames), clearhead as (B, frames, features)."""

    pads_source: ClassVar[bool] = False  # all recordings have one length

    def example(self) -> tuple[Tensor, ...]:
        shape = (B, 2 * self.sizes["max_source_positions"], self.sizes["num_mel_bins"])
        frames = torch.randn(shape, dtype=torch.float64)
        return frames, words()[:, :7]

    def run(self, model: nn.Module, source: Tensor, target: Tensor, **more: Any) -> Any:
        return super().run(model, source.transpose(1, 2), target)

    def padded(self, model: nn.Module, source: Tensor, target: Tensor, *, is_token: tuple[Tensor, ...]) -> Tensor:
        return super().padded(model, source.transpose(1, 2), target, is_token=is_token)

    def weights(self, model: nn.Module, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        return super().weights(model, source.transpose(1, 2), target)


@dataclass(frozen=True)
class T5Peer(TwoSided):
    """T5, with norms that compute in the model's dtype instead of float32."""

    has_decoder: bool = True

    def example(self) -> tuple[Tensor, ...]:
        return super().example() if self.has_decoder else super().example()[:1]

    def run(self, model: nn.Module, source: Tensor, *target: Tensor) -> Any:
        return super().run(model, source, *target) if target else Peer.run(self, model, source)

    def padded(self, model: nn.Module, source: Tensor, *target: Tensor, is_token: tuple[Tensor, ...]) -> Tensor:
        padded = super().padded if target else partial(Peer.padded, self)
        return padded(model, source, *target, is_token=is_token)

    def weights(self, model: nn.Module, source: Tensor, *target: Tensor) -> dict[str, Tensor]:
        if target:
            return super().weights(model, source, *target)
        model.get_encoder().set_attn_implementation("eager")
        return Peer.weights(self, model, source)

    def tokens(self) -> Any:
        return super().tokens() if self.has_decoder else Peer.tokens(self)

    def build(self) -> nn.Module:
        model = super().build()
        if self.sizes.get("tie_word_embeddings") is False:
            # T5 1.1 has an untied output matrix; transformers 5 initializes it tied.
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        return self._exact(model)

    def reload(self, folder: Path) -> nn.Module:
        return self._exact(super().reload(folder))

    def _exact(self, model: nn.Module) -> nn.Module:
        for part in model.modules():
            if type(part).__name__.endswith("T5LayerNorm"):
                norm = {"weight": part.weight, "eps": part.variance_epsilon, "normalized_shape": part.weight.shape}
                part.forward = partial(torch.nn.functional.rms_norm, **norm)
        return model


class Dino(Peer):
    """DINOv2, without the mask token of pretraining, which clearhead does not load."""

    def reload(self, folder: Path) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.model)
        model, report = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
        assert all(name.endswith("embeddings.mask_token") for names in report.values() for name in names), report
        return model.eval()

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().state(model).items() if not name.endswith("mask_token")}

    def n_parameters(self, model: nn.Module) -> int:
        return sum(weight.numel() for weight in self.state(model).values())


class Timm(Peer):
    """A model of timm."""

    def build(self) -> nn.Module:
        timm = pytest.importorskip("timm", reason="timm, the reference to compare with, is missing")
        return perturbed(timm.create_model(self.model, **self.sizes))

    def save(self, model: nn.Module, folder: Path) -> None:
        from timm.models import save_for_hf

        save_for_hf(model, folder, model_args=self.sizes, safe_serialization="both")
        for pickle in folder.glob("*.bin"):
            pickle.unlink()

    def reload(self, folder: Path) -> nn.Module:
        import timm

        with in_float64():
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs)

    def weights(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for i, block in enumerate(model.blocks):
            block.attn.fused_attn = False
            keep = partial(weights.__setitem__, f"blocks.{i}.attention")
            block.attn.attn_drop.register_forward_hook(lambda _m, _i, out, keep=keep: keep(out))
        model(inputs)
        return weights


def assert_close(actual: Tensor, expected: Tensor, *, in_float32: bool = False) -> None:
    """Assert equality up to rounding of the largest value, in the dtype that the reference model computes in."""
    assert actual.shape == expected.shape
    unit = 100 * torch.finfo(torch.float32).eps if in_float32 else 3000 * torch.finfo(torch.float64).eps
    limit = unit * max(1.0, expected.abs().max().item())
    worst = (actual - expected).abs().max().item()
    assert worst <= limit, f"differs by {worst:.3g}, allowed {limit:.3g}"


@contextmanager
def in_float64() -> Iterator[None]:
    """Build models in float64, including buffers; a later conversion would keep values rounded to float32."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def perturbed(model: nn.Module) -> nn.Module:
    """Perturb every parameter (zero biases and unit norms would hide a swap), in float64 and evaluation mode."""
    torch.manual_seed(13)
    model = model.double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # Marian's sinusoids are frozen parameters
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def words() -> Tensor:
    """Return ids without 0 and 1, which are padding in some families."""
    return torch.randint(2, V, (B, T))


def ids_with_end() -> Tensor:
    """Return ids with the end id V − 2 at a different position in each row (twice in one), and a larger id."""
    ids = torch.randint(2, V - 2, (B, T))
    ids[0, 4] = ids[0, 7] = ids[1, 9] = V - 2
    ids[:, 2] = V - 1
    return ids


def squares() -> Tensor:
    return torch.randn(B, 2, 9, 9, dtype=torch.float64)


def images() -> Tensor:
    return torch.randn(B, 2, 6, 9, dtype=torch.float64)
