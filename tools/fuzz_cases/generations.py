"""Generation with prompts of different lengths in some slots, compared with one row at a time without a cache.

Greedy ids are compared with a loop that runs the model on the whole row for every new id. Sampling and beam search must
agree with and without a cache, and beam search also for a prompt alone and in a batch.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.generation import BeamSearch, Greedy, Sample, generate
from clearhead.generation.engine.slot_decoder import static_shapes
from clearhead.models import Config
from tools.fuzz_cases import Case, CaseFailure
from tools.fuzz_cases.configs import GOOD

VOCAB, MAX_LEN = 13, 29


def draw(chance: random.Random, device: str) -> Case:
    positions = chance.choice(
        [{"type": "LearnedPositions", "max_len": MAX_LEN}, *GOOD["positions"][:1], *GOOD["positions"][2:]]
    )
    return {
        "device": device,
        "seq2seq": chance.randint(0, 1) if chance.random() < 0.5 else 0,
        "positions": positions,
        "mask": chance.choice(["causal()", *GOOD["mask"]]),
        "n_kv_heads": chance.choice([1, 2, 4]),
        "norm": chance.choice(GOOD["norm"]),
        "residual": chance.choice([*GOOD["residual"], {"type": "Parallel"}, {"type": "SandwichNorm"}]),
        "activation": chance.choice(GOOD["activation"]),
        "scores": chance.choice([{"type": "ScaledDot"}, {"type": "SoftCapped", "cap": 2.0}]),
        "experts": chance.choice([None, None, {"n": 3, "top_k": 2}]),
        "layer_masks": chance.choice([[], [], ["window(2, 0)", "full()"]]),
        "layer_scale": chance.choice([None, None, 0.5]),
        "lengths": [chance.randint(1, 9) for _ in range(chance.randint(1, 7))],
        "new": chance.choice([1, 2, 5, 9]),
        "stop": chance.choice([None, 3, [3, 5]]),
        "slots": chance.choice(["auto", 1, 2, 3]),
        "static": chance.randint(0, 1),
        "strategy": chance.choice(["greedy", "greedy", "sample", "beam"]),
        "width": chance.randint(1, 4),
        "seed": chance.randint(0, 999),
    }


def check(case: Case) -> list[str]:
    model = _model(case)
    chance = random.Random(case["seed"])
    prompts = [[chance.randrange(VOCAB) for _ in range(max(1, n))] for n in case["lengths"]] or [[1]]
    strategy = {"greedy": Greedy(), "sample": Sample(seed=case["seed"]), "beam": BeamSearch(max(1, case["width"]))}[
        case["strategy"]
    ]
    options: dict[str, Any] = {"strategy": strategy, "max_new_tokens": max(1, case["new"]), "stop_ids": case["stop"]}
    if case["seq2seq"]:
        options["decoder_start_ids"] = 1
    with static_shapes() if case["static"] else nullcontext():
        cached = generate(model, prompts, slots=case["slots"], **options)
    plain = generate(model, prompts, use_cache=False, **options)
    for row, prompt in enumerate(prompts):
        ids, plain_ids = cached.sequence(row, with_stop=True).tolist(), plain.sequence(row, with_stop=True).tolist()
        if ids != plain_ids:
            raise CaseFailure(f"prompt {row} continues with {ids} with a cache and with {plain_ids} without")
        if case["strategy"] == "greedy":
            loop_ids = _by_hand(model, prompt, case)
            if loop_ids is not None and ids != loop_ids:
                raise CaseFailure(f"prompt {row} continues with {ids}, expected {loop_ids} from a loop without a cache")
        if case["strategy"] == "beam":
            alone_ids = generate(model, [prompt], **options).sequence(with_stop=True).tolist()
            if ids != alone_ids:
                raise CaseFailure(f"prompt {row} continues with {ids} in a batch and with {alone_ids} alone")
    if not torch.allclose(cached.scores, plain.scores, rtol=1e-6, atol=1e-6):
        raise CaseFailure(f"scores are {cached.scores.tolist()} with a cache and {plain.scores.tolist()} without")
    return [case["strategy"], case["positions"]["type"], "seq2seq" if case["seq2seq"] else "decoder"]


def _model(case: Case) -> nn.Module:
    names = (
        *("positions", "n_kv_heads", "norm", "residual", "activation"),
        *("scores", "experts", "layer_masks", "layer_scale"),
    )
    fields: dict[str, Any] = {name: case[name] for name in names}
    fields |= {"vocab_size": VOCAB, "max_len": MAX_LEN, "d_model": 16, "n_heads": 4, "d_ff": 7}
    if case["seq2seq"]:
        fields |= {"type": "EncoderDecoderConfig", "n_encoder_layers": 1, "n_decoder_layers": 2}
    else:
        fields |= {"type": "DecoderConfig", "n_layers": 2, "mask": case["mask"]}
    torch.manual_seed(case["seed"])
    model = Config.from_dict(fields).build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.5)  # logits of an untrained model are nearly constant
    return model.double().to(case["device"]).eval()


@torch.no_grad()
def _by_hand(model: nn.Module, prompt: list[int], case: Case) -> list[int] | None:
    """Generate one row without a cache; return None if rounding decides between two ids."""
    new: list[int] = []
    for _ in range(max(1, case["new"])):
        logits = _logits(model, prompt, new, case)
        best, second = logits.topk(2).values.tolist()
        if best - second < 1e-9:
            return None
        new.append(int(logits.argmax()))
        if new[-1] in (case["stop"] if isinstance(case["stop"], list) else [case["stop"]]):
            break
    return new


def _logits(model: nn.Module, prompt: list[int], new: list[int], case: Case) -> Tensor:
    def ids(row: list[int]) -> Tensor:
        return torch.tensor([row], device=case["device"])

    out = model(ids(prompt), ids([1, *new])) if case["seq2seq"] else model(ids(prompt + new))
    return out[0, -1]
