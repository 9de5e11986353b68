"""Tests of saved models: bit-equal parameters, interrupted saves, and an error message per fault."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clearhead._core.atomic_io import write_atomically
from clearhead.errors import StorageError
from clearhead.masks import causal, padding
from clearhead.models import load_checkpoint, save_checkpoint, tiny_decoder, tiny_encoder_decoder, tiny_vision
from clearhead.nn.positions import ALiBi, RelativeBias
from tests.support.rounding import assert_equal_up_to_rounding


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@pytest.fixture
def model():
    torch.manual_seed(5)
    return tiny_decoder().build().eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    module, reference = a.state_dict(), b.state_dict()
    return module.keys() == reference.keys() and all(torch.equal(module[name], reference[name]) for name in module)


@pytest.mark.parametrize(
    "config",
    [
        tiny_decoder(),
        tiny_decoder().replace(tie_embeddings=False, positions=RelativeBias()),
        tiny_decoder().replace(positions=ALiBi(), mask=causal()),
        tiny_encoder_decoder(),
        tiny_vision(),
    ],
)
def test_load_returns_bit_equal_parameters(config, folder):
    torch.manual_seed(5)
    model = config.build().eval()
    before = torch.get_rng_state()
    assert save_checkpoint(model, folder) == folder
    again = load_checkpoint(folder)
    assert torch.equal(torch.get_rng_state(), before), "loading must not draw random numbers"
    assert type(again) is type(model)
    assert again.config == config
    assert same(model, again)
    assert not again.training
    assert all(weight.requires_grad and not weight.is_meta for weight in again.parameters())
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "model.safetensors"]


def test_loaded_model_computes_and_trains(model, folder):
    save_checkpoint(model, folder)
    again = load_checkpoint(folder)
    ids = torch.arange(11)[None]
    assert_equal_up_to_rounding(again(ids), model(ids))
    again(ids).sum().backward()
    assert again.embedding.weight.grad is not None


def test_tied_parameters_are_stored_once_and_stay_tied(folder):
    model = tiny_encoder_decoder().build()
    save_checkpoint(model, folder)
    stored = load_file(folder / "model.safetensors")
    assert "encoder.embedding.weight" in stored
    assert "decoder.embedding.weight" not in stored
    again = load_checkpoint(folder)
    assert again.decoder.embedding.weight is again.encoder.embedding.weight
    assert sum(p.numel() for p in again.parameters()) == sum(x.numel() for x in stored.values())


class Computed(nn.Module):
    """A model with a buffer that is computed when it is built, and not stored."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(3, 2)
        self.register_buffer("steps", torch.arange(5.0), persistent=False)


def test_load_recomputes_non_persistent_buffers(folder, monkeypatch):
    config = tiny_decoder()
    monkeypatch.setattr(type(config), "build", lambda self: Computed(self))
    model = Computed(config)
    save_checkpoint(model, folder)
    state = torch.get_rng_state()
    again = load_checkpoint(folder)
    assert same(model, again)
    assert again.steps.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_unchanged_unless_dtype_is_given(dtype, model, folder):
    save_checkpoint(model, folder, dtype=dtype)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {dtype}
    narrow, wide = load_checkpoint(folder), load_checkpoint(folder, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert narrow.state_dict()[name].dtype == dtype
        assert torch.equal(narrow.state_dict()[name], weight.to(dtype))
        assert torch.equal(wide.state_dict()[name], weight.to(dtype).float())


def test_save_of_values_outside_half_precision_raises(model, folder):
    with torch.no_grad():
        model.embedding.weight[0, 0] = 70_000.0
    with pytest.raises(
        StorageError, match=r"embedding.weight reaches 7e\+04, which is outside the range of torch.float16"
    ):
        save_checkpoint(model, folder, dtype=torch.float16)
    assert not folder.exists()
    save_checkpoint(model, folder, dtype=torch.bfloat16)


def test_save_keeps_other_files_in_the_folder(model, folder):
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    save_checkpoint(model, folder)
    save_checkpoint(model, folder)
    assert (folder / "README.md").read_text() == "mine"


def test_save_of_compiled_model_uses_original_names(model, folder):
    save_checkpoint(torch.compile(model), folder)  # nothing is compiled until it is called
    assert same(load_checkpoint(folder), model)


# ---------------------------------------------------------------------- interrupted saves


def crash_at(monkeypatch, name: str, turn: int, hard: bool):
    """A save stops at the given call of storage's `os.replace`, `os.fsync` or save_file; after a power cut (`hard`) no
    clean-up does anything either."""
    calls = iter(range(100))
    owner = os
    if name == "save_file":
        import safetensors.torch as owner
    real = getattr(owner, name)

    def stopped(*args, **kwargs):
        if next(calls) == turn:
            for call in ("fsync", "replace", "rmdir", "unlink") if hard else ():
                monkeypatch.setattr(os, call, off)
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    def off(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, stopped)


POINTS = [
    ("save_file", 0),
    ("fsync", 0),
    ("fsync", 1),
    ("fsync", 2),
    ("replace", 0),
    ("replace", 1),
    ("fsync", 3),
]


@pytest.mark.parametrize("hard", [False, True], ids=["exception", "power cut"])
@pytest.mark.parametrize(("name", "turn"), POINTS)
def test_interrupted_save_leaves_one_complete_model(name, turn, hard, model, folder, monkeypatch):
    """Old and new differ in configuration too, so a mixture of their files could not be loaded."""
    save_checkpoint(model, folder)
    torch.manual_seed(7)
    new = tiny_decoder().replace(d_model=20, n_layers=1).build()
    with monkeypatch.context() as patch:
        crash_at(patch, name, turn, hard)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(new, folder)
    result = load_checkpoint(folder)
    committed = (name, turn) in [("replace", 1), ("fsync", 3)]
    assert same(result, new if committed else model)
    if not hard and not committed:
        assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "model.safetensors"]
    # The next save clears up and wins.
    save_checkpoint(model, folder)
    assert same(load_checkpoint(folder), model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "model.safetensors"]


def test_failed_first_save_leaves_no_files(model, folder, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match=r"cannot save to .*model: No space left on device"):
        save_checkpoint(model, folder)
    assert not folder.exists()


# ---------------------------------------------------------------------- faults


def edited(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def without(name):
    return lambda tensors: tensors.pop(name)


def fault_not_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95 this is a pickle")


def fault_truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def fault_shape(folder):
    edited(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(7)}))


def fault_dtype(folder):
    edited(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(32, dtype=torch.int64)}))


def fault_unexpected(folder):
    edited(folder, lambda tensors: tensors.update({"stranger": torch.ones(7)}))


def fault_config(text):
    return lambda folder: (folder / "config.toml").write_text(text)


FAULTS = {
    "no folder": (
        lambda folder: os.rename(folder, folder.with_name("moved")),
        "does not exist; expected a folder with",
    ),
    "no config": (
        lambda folder: (folder / "config.toml").unlink(),
        "has no config.toml; expected a folder written by save",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has config.toml but no model.safetensors",
    ),
    "config is not TOML": (fault_config("= 3"), "config.toml: this is not TOML"),
    "config is not text": (
        lambda folder: (folder / "config.toml").write_bytes(b"\xff\xfe"),
        "config.toml: .*utf-8",
    ),
    "unknown model": (
        fault_config('type = "Decoder"'),
        "unknown configuration 'Decoder'; did you mean 'DecoderConfig'",
    ),
    "not safetensors": (fault_not_safetensors, "is not a complete safetensors file"),
    "truncated": (fault_truncated, "is not a complete safetensors file"),
    "missing": (lambda folder: edited(folder, without("norm.weight")), "missing: norm.weight"),
    "unexpected": (fault_unexpected, "unexpected: stranger"),
    "shape": (fault_shape, r"shapes: norm.weight is \(7,\), expected \(32,\)"),
    "dtype": (fault_dtype, "dtypes: norm.weight is I64, expected one of F64/F32/F16/BF16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_load_of_invalid_folder_raises_specific_message(fault, model, folder):
    save_checkpoint(model, folder)
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(StorageError, match=message):
        load_checkpoint(folder)


def test_load_with_many_mismatches_raises_one_short_message(model, folder):
    save_checkpoint(model, folder)
    config = (folder / "config.toml").read_text().replace("n_layers = 2", "n_layers = 5")
    (folder / "config.toml").write_text(config)
    with pytest.raises(StorageError, match=r"does not match the Decoder .*missing: .* and \d+ more\. Use files"):
        load_checkpoint(folder)


def test_load_does_not_unpickle(folder):
    """Reject a torch.save file named model.safetensors without running its payload."""

    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "ran"),))

    save_checkpoint(tiny_decoder().build(), folder)
    torch.save({"x": Payload()}, folder / "model.safetensors")
    with pytest.raises(StorageError, match="not a complete safetensors file"):
        load_checkpoint(folder)
    assert not (folder / "ran").exists()


def test_load_and_save_with_file_as_folder_raise(tmp_path, model):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StorageError, match="is a file; expected a folder"):
        load_checkpoint(path)
    with pytest.raises(StorageError, match="cannot save to"):
        save_checkpoint(model, path)


def test_save_of_unsupported_model_raises(folder):
    with pytest.raises(StorageError, match=r"Linear has no \.config to store"):
        save_checkpoint(nn.Linear(2, 3), folder)
    with torch.device("meta"):
        hollow = tiny_decoder().build()
    with pytest.raises(StorageError, match="on the meta device and has no data"):
        save_checkpoint(hollow, folder)
    with pytest.raises(StorageError, match=r"got dtype=torch\.int8, expected one of torch\.float64"):
        save_checkpoint(tiny_decoder().build(), folder, dtype=torch.int8)
    lengths = torch.tensor([3])
    with pytest.raises(StorageError, match=r"DecoderConfig cannot be stored: .*contains data"):
        save_checkpoint(tiny_decoder().replace(mask=padding(lengths)).build(), folder)
    assert not folder.exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"dtype": torch.int64}, r"got dtype=torch\.int64, expected one of torch\.float64"),
        ({"dtype": torch.complex64}, r"got dtype=torch\.complex64"),
        ({"device": "nonsense"}, "got device='nonsense', which is not available"),
        ({"device": "cuda:97"}, "got device='cuda:97', which is not available"),
        ({"device": "meta"}, "got device='meta'"),
    ],
    ids=str,
)
def test_load_with_invalid_dtype_or_device_raises(wish, words, model, folder):
    save_checkpoint(model, folder)
    with pytest.raises(StorageError, match=words):
        load_checkpoint(folder, **wish)


@pytest.mark.bad_input
@pytest.mark.parametrize("size", ["100000000000", "1" + 40 * "0"])
def test_load_with_huge_sizes_raises(size, model, folder):
    save_checkpoint(model, folder)
    path = folder / "config.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("d_model = 32", f"d_model = {size}"), encoding="utf-8")
    with pytest.raises(StorageError, match="describes a model that cannot be built"):
        load_checkpoint(folder)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'type = "TextConfig"\nd_model = 4\nn_heads = 2\nvocab_size = 3\n',
            "cannot be built: TextConfig does not describe a model",
        ),
        ("x = " + 9999 * "[", "this is not TOML"),
    ],
    ids=["no model", "deep"],
)
def test_load_of_config_without_model_raises(text, words, model, folder):
    save_checkpoint(model, folder)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(StorageError, match=words):
        load_checkpoint(folder)


@pytest.mark.parametrize("n_layers", [20_000, 10**12])
def test_load_with_too_many_layers_raises_before_building(model, folder, n_layers, monkeypatch):
    save_checkpoint(model, folder)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("n_layers = 2", f"n_layers = {n_layers}"))
    value = []
    build = nn.LayerNorm.__init__
    monkeypatch.setattr(nn.LayerNorm, "__init__", lambda self, *a, **kw: (value.append(1), build(self, *a, **kw))[1])
    n_stored = len(load_file(folder / "model.safetensors"))
    words = rf"config.toml describes a model with more than \d+ parameter tensors, and {n_stored} are stored;"
    with pytest.raises(StorageError, match=words):
        load_checkpoint(folder)
    assert len(value) < 3 * n_stored + 100
    tiny_decoder().replace(n_layers=31).build()  # nothing is counted any longer


# -------------------------------------------------------------------- full disks and file permissions


@pytest.mark.parametrize("room", [9, 3_000])  # too little for the configuration too, or for the weights only
def test_save_on_full_disk_raises_and_keeps_old_model(model, folder, small_disk, room):
    save_checkpoint(model, folder)
    other = tiny_decoder().replace(d_ff=37).build()
    with (
        small_disk(room),
        pytest.raises(StorageError, match=f"cannot save to {folder}: File too large; .*unchanged") as e,
    ):
        save_checkpoint(other, folder)
    assert "\n" not in str(e.value)
    assert same(load_checkpoint(folder), model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "model.safetensors"]
    with small_disk(room), pytest.raises(StorageError):
        save_checkpoint(other, folder.with_name("new"))
    assert not folder.with_name("new").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_saved_files_follow_the_umask(model, folder, mask, mode):
    before = os.umask(mask)
    try:
        save_checkpoint(model, folder)
        save_checkpoint(model, folder)
        write_atomically(folder / "tokenizer.json", b"{}")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "config.toml": mode,
        "model.safetensors": mode,
        "tokenizer.json": mode,
    }
