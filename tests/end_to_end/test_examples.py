"""The models of `examples/` return the same logits as the library's models with the same parameters, and they learn."""

import importlib.util
from pathlib import Path

import pytest
import torch

from clearhead import Decoder, EncoderDecoder, KVCache, VisionTransformer
from clearhead.masks import padding
from clearhead.models import DecoderConfig, EncoderDecoderConfig, VisionConfig
from clearhead.nn import GELU, ReLU
from clearhead.nn.positions import LearnedPositions, Sinusoidal

FOLDER = Path(__file__).parents[2] / "examples"


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt():
    return load_example("gpt").GPT(vocab_size=23, max_len=13, d_model=15, n_layers=2, n_heads=3)


def share_parameters(example, reference):
    """Load the perturbed parameters of the example into the reference, and check that the reverse works too."""
    with torch.no_grad():
        for parameter in example.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.load_state_dict(example.state_dict(), strict=True)
    example.load_state_dict(reference.state_dict(), strict=True)


def test_gpt_equals_decoder():
    torch.manual_seed(0)
    example = gpt()
    config = DecoderConfig(
        vocab_size=23,
        max_len=13,
        d_model=15,
        n_layers=2,
        n_heads=3,
        activation=GELU(tanh=True),
        positions=LearnedPositions(max_len=13),
    )
    reference = Decoder(config)
    share_parameters(example, reference)
    ids = torch.randint(23, (3, 11))
    torch.testing.assert_close(example(ids), reference(ids), rtol=1e-5, atol=1e-5)


def test_gpt_with_cache_equals_full_forward_pass():
    torch.manual_seed(0)
    example, ids, cache = gpt(), torch.randint(23, (3, 11)), KVCache()
    full = example(ids)
    parts = torch.cat([example(part, cache) for part in ids.split((5, 1, 3, 2), dim=1)], dim=1)
    torch.testing.assert_close(parts, full, rtol=1e-5, atol=1e-5)


def test_gpt_learns_and_generates_a_sequence():
    torch.manual_seed(0)
    module = load_example("gpt")
    model = module.GPT(vocab_size=7, max_len=8, d_model=16, n_layers=1, n_heads=2)
    ids = torch.arange(7).repeat(9)
    losses = module.train(model, ids, steps=60, lr_max=1e-2)
    assert losses[0] > 1.5 > 0.1 > losses[-1]
    assert module.generate(model, ids[:3], max_new_tokens=20, temperature=0.1).tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_translate_equals_encoder_decoder():
    torch.manual_seed(0)
    example = load_example("translate").Translator(19, 23, d_model=18, n_layers=2, n_heads=3)
    config = EncoderDecoderConfig(
        vocab_size=23,
        source_vocab_size=19,
        d_model=18,
        n_heads=3,
        n_encoder_layers=2,
        n_decoder_layers=2,
        positions=Sinusoidal(),
        scaled_embedding=True,
        activation=ReLU(),
    )
    reference = EncoderDecoder(config)
    share_parameters(example, reference)
    source, target, lengths = torch.randint(19, (3, 11)), torch.randint(23, (3, 7)), torch.tensor([11, 5, 2])
    expected = reference(source, target, source_mask=padding(lengths))
    torch.testing.assert_close(example(source, target, lengths), expected, rtol=1e-5, atol=1e-5)


def test_translate_learns_its_training_pairs():
    torch.manual_seed(0)
    module = load_example("translate")
    pairs = module.sums()
    assert len(set(pairs)) == len(pairs) == 1400
    assert all(a.split()[0] in module.TENS[0] and b.split()[0] in module.TENS[1] for a, b in pairs)
    subset = pairs[:5]
    source, target = (module.Words([pair[side] for pair in subset]) for side in (0, 1))
    model = module.Translator(len(source.words), len(target.words), d_model=32, n_layers=1, n_heads=2)
    module.train(model, source, target, subset, steps=150)
    assert module.translate(model, source, target, [a for a, _ in subset]) == [b for _, b in subset]


def test_vit_equals_vision_transformer():
    torch.manual_seed(0)
    example = load_example("vit").ViT(side=15, patch=5, n_classes=7, d_model=18, n_layers=2, n_heads=3, n_channels=2)
    config = VisionConfig(
        image_size=(15, 15), patch_size=5, n_classes=7, n_channels=2, d_model=18, n_layers=2, n_heads=3
    )
    reference = VisionTransformer(config)
    share_parameters(example, reference)
    images = torch.randn(3, 2, 15, 15)
    torch.testing.assert_close(example(images), reference(images), rtol=1e-5, atol=1e-5)


def test_vit_learns_the_position_of_a_pixel():
    torch.manual_seed(0)
    module = load_example("vit")
    model = module.ViT(side=4, patch=2, n_classes=4, d_model=16, n_layers=1, n_heads=2)
    images = torch.zeros(4, 1, 4, 4)
    for i, (row, column) in enumerate(((0, 0), (0, 2), (2, 0), (2, 2))):
        images[i, 0, row, column] = 1.0
    module.train(model, images, torch.arange(4), steps=60)
    assert module.accuracy(model, images, torch.arange(4)) == 1.0


@pytest.mark.parametrize("name", ["gpt", "translate", "vit"])
def test_example_has_at_most_200_lines(name):
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 200


def test_invalid_input_exits_with_a_message(tmp_path):
    (tmp_path / "empty.tsv").write_text("no tab here\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no pairs"):
        load_example("translate").main(str(tmp_path / "empty.tsv"))
    with pytest.raises(SystemExit, match="never uses"):
        load_example("gpt").main(str(FOLDER / "vit.py"), "☃")
    (tmp_path / "pairs.tsv").write_text("a b\tc\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="not in the training pairs: d"):
        load_example("translate").main(str(tmp_path / "pairs.tsv"), "a d", steps=1)
