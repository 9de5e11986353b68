"""`register_family`: a family from outside of the package is loaded, exported and listed; names are not replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.errors import DtypeError, StorageError
from clearhead.hub import WeightMap, block, convert, register_family
from clearhead.hub.families import FAMILIES
from clearhead.hub.families.decoders import GPT2, LLAMA
from clearhead.hub.family import Converter, Family, Field
from clearhead.models import DecoderConfig
from clearhead.nn import RMSNorm, SwiGLU
from clearhead.nn.positions import Rotary
from tests.docs.pages import read_page

SIZES = {"vocab": 31, "width": 24, "depth": 2, "heads": 4, "hidden": 23, "context": 13}
TINY = Family(
    name="tiny_llm",
    architecture="TinyLLM",
    kind=DecoderConfig,
    fields={
        "vocab": "vocab_size",
        "width": "d_model",
        "depth": "n_layers",
        "heads": "n_heads",
        "hidden": "d_ff",
        "context": "max_len",
        "epsilon": Field("norm", 1e-5, lambda eps: RMSNorm(eps=eps), lambda norm: norm.eps),
    },
    required={"bias": False},
    defaults={"activation": SwiGLU(), "bias": False},
    converters=(
        Converter(
            lambda keys: {"positions": Rotary(base=keys("theta", 10_000.0))},
            lambda config: {"theta": config.positions.base},
        ),
    ),
    rows=(
        WeightMap("wte.weight", "embedding.weight"),
        *block("layers.#", q="att.q", k="att.k", v="att.v", o="att.out", norm1="norm_a", norm2="norm_f"),
        *block("layers.#", gate="ffn.gate", up="ffn.up", down="ffn.down"),
        WeightMap("norm.weight", "norm.weight"),
    ),
)


@pytest.fixture
def registered():
    register_family(TINY)
    yield TINY
    del FAMILIES[TINY.name]


def saved(folder):
    """Write a checkpoint of the family with random parameters; return its tensors."""
    torch.manual_seed(0)
    layer = dict.fromkeys(("att.q", "att.k", "att.v", "att.out"), (24, 24))
    layer |= {"ffn.gate": (23, 24), "ffn.up": (23, 24), "ffn.down": (24, 23), "norm_a": (24,), "norm_f": (24,)}
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte.weight": (31, 24), "norm.weight": (24,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "tiny_llm", "epsilon": 1e-4, "theta": 500.0, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_registered_family_loads_and_exports_its_tensors(registered, tmp_path):
    tensors = saved(tmp_path / "model")
    model = ch.load(tmp_path / "model")
    assert (model.config.norm, model.config.positions.base) == (RMSNorm(eps=1e-4), 500.0)
    assert torch.equal(model.blocks[1].attention.k_proj.weight, tensors["layers.1.att.k.weight"])
    assert convert.export_third_party(model, tmp_path / "out", family="tiny_llm") is registered
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


def test_example_of_the_guide_defines_a_family_in_less_than_60_lines(tmp_path, monkeypatch):
    (cell,) = (cell for cell in read_page("guides/load-and-export.md").cells if "register_family(" in cell)
    definition = cell[cell.index("register_family(") :].partition("\n)\n")[0]
    assert len(definition.splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    names = {"ch": ch, "json": json, "Path": Path}
    try:
        exec(cell, names)
        assert names["model"](torch.tensor([[3, 1, 4]])).shape == (1, 3, 11)
        assert convert.export_third_party(names["model"], tmp_path / "out", family="tiny_llm").name == "tiny_llm"
    finally:
        FAMILIES.pop("tiny_llm", None)
    assert "tiny_llm" not in FAMILIES


@pytest.mark.bad_input
def test_unregistered_family_raises_an_error_that_names_register_family(tmp_path):
    saved(tmp_path / "model")
    with pytest.raises(StorageError, match=r"'tiny_llm' model; .*clearhead\.hub\.register_family.*guide"):
        ch.load(tmp_path / "model")


@pytest.mark.bad_input
def test_register_family_of_an_existing_name_raises():
    with pytest.raises(StorageError, match="there is a family 'gpt2'"):
        register_family(GPT2)
    assert FAMILIES["llama"] is LLAMA
    register_family(LLAMA, replace=True)
    with pytest.raises(DtypeError, match="got str; expected a"):
        register_family("gpt2")
