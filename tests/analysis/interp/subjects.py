"""Models, inputs and hooks of the tests of attribution, logit lens, patching and ablation."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, EncoderDecoderConfig, VisionConfig, vision
from clearhead.nn import Parallel, PostNorm, RMSNorm
from clearhead.nn.positions import ALiBi, LearnedPositions, Rotary

V, T, S = 31, 5, 3
SIZES = {"d_model": 24, "n_heads": 6}
KINDS = {
    "pre-norm": {},
    "post-norm": {"residual": PostNorm()},
    "rms, rotary, untied": {"norm": RMSNorm(), "positions": Rotary(), "tie_embeddings": False},
    "unit offset, ALiBi": {"norm": RMSNorm(unit_offset=True), "positions": ALiBi()},
    "parallel, learned, embedding norm, scaled": {
        "residual": Parallel(),
        "positions": LearnedPositions(max_len=11),
        "max_len": 11,
        "embedding_norm": True,
        "scaled_embedding": True,
    },
}


def randomize(model):
    """Return the model in float64 with random parameters, so that a missing norm or bias changes the result."""
    for name, parameter in model.named_parameters():
        middle = 0.0 if parameter.dim() > 1 or "bias" in name else 1.0
        nn.init.normal_(parameter, mean=middle, std=0.3)
    return model.double().eval()


def decoder(**options):
    return randomize(Decoder(DecoderConfig(n_layers=2, n_kv_heads=2, vocab_size=V, **SIZES, **options)))


def encoder_decoder():
    return randomize(
        EncoderDecoder(EncoderDecoderConfig(n_encoder_layers=2, n_decoder_layers=2, vocab_size=V, **SIZES))
    )


def vision_model(pooling):
    sizes = {"image_size": (12, 8), "patch_size": 4, "n_channels": 1, "n_classes": 5, "n_layers": 2}
    return randomize(VisionConfig(**sizes, **SIZES, pooling=pooling).build())


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return randomize(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_head=6, n_layer=2, vocab_size=V, **ends, **options)
        )
    )


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers is an optional peer")
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
    return randomize(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=V))
    )


def ids(length=T):
    return torch.randint(V, (1, length))


def change_middle_token(x):
    """Return a copy with another token in the middle."""
    other = x.clone()
    other[:, x.shape[1] // 2] = (x[:, x.shape[1] // 2] + 1) % V
    return other


def image():
    return torch.randn(1, 1, 12, 8, dtype=torch.float64)


CASES = {
    **{
        name: lambda options=options: (decoder(**options), ids(), change_middle_token)
        for name, options in KINDS.items()
    },
    "encoder-decoder": lambda: (
        encoder_decoder(),
        (ids(S), ids()),
        lambda model_args: (model_args[0], change_middle_token(model_args[1])),
    ),
    "vision, [CLS]": lambda: (vision_model(vision.ClsPooling()), image(), lambda x: x.flip(-1)),
    "vision, mean": lambda: (vision_model(vision.MeanPooling()), image(), lambda x: x.flip(-1)),
    "gpt2": lambda: (gpt2(), ids(), change_middle_token),
    "llama": lambda: (llama(), ids(), change_middle_token),
}


PATCHING_CASES = ("pre-norm", "encoder-decoder", "vision, [CLS]", "gpt2", "llama")


def run_logits(model, model_args):
    with torch.no_grad():
        output = model(*model_args) if isinstance(model_args, tuple) else model(model_args)
    return getattr(output, "logits", output)


@contextmanager
def forward_hooks(*hooks):
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def record_with_hooks(model, paths, model_args):
    """Return inputs and outputs of modules, recorded by forward hooks, and the logits."""
    inputs, outputs = {}, {}

    def make_hook(path):
        def hook(module, args, output):
            inputs[path] = args[0] if args else None
            outputs[path] = output[0] if isinstance(output, tuple) else output

        return hook

    with forward_hooks(*((model.get_submodule(path), make_hook(path)) for path in paths)):
        logits = run_logits(model, model_args)
    return inputs, outputs, logits


def rounding(*sizes, name=""):
    """Return the tolerance; norms of transformers' Llama compute in float32 in every dtype."""
    return 1e3 * torch.finfo(torch.float32 if name == "llama" else torch.float64).eps * max(1.0, *map(abs, sizes))
