"""The guided tour: seven steps about one run.

Every sentence is computed from this run and linked to the view that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from clearhead import analysis
from clearhead._core.json_types import JSONObject
from clearhead.analysis.inputs.model_inputs import run_logits
from clearhead.analysis.views.attention_map import AttentionMap
from clearhead.errors import ConfigError
from clearhead.explorer.causal_panel import MeasuredCall, measured_call
from clearhead.explorer.interpret_panel import StepRequest, source_shares
from clearhead.explorer.model_input import EncodedInput, encode_input, with_answer
from clearhead.explorer.request import RequestContext, action
from clearhead.explorer.view_panel import attention_report

_KINDS = {"attention": "self-attention", "cross_attention": "cross-attention", "feed_forward": "feed-forward"}
_POSITIONAL = ("previous token", "next token", "first token", "diagonal", "same token", "induction")


@dataclass(frozen=True)
class TourLink:
    """A link to a view: its label, and the panel and state of the view."""

    label: str
    panel: str
    state: dict[str, str]


@dataclass(frozen=True)
class TourStep:
    """One step: a title, a sentence, and the views that show it."""

    title: str
    sentence: str
    links: tuple[TourLink, ...]


@action(StepRequest)
def tour(request: StepRequest, context: RequestContext) -> JSONObject:
    """Return the steps of the tour of a run; it explains one generated token, by default the least certain one."""
    encoded = with_answer(encode_input(request, context))
    if not encoded.generated_ids:
        raise ConfigError("nothing was generated; press All, and the tour explains the output")
    with torch.no_grad():
        probabilities = _probabilities(encoded)
        least = min(range(len(probabilities)), key=probabilities.__getitem__)
        step = least if request.step is None else min(request.step, len(probabilities) - 1)
        maps = attention_report(request, context).maps
        context.checkpoint(1, 4, "attention")
        steps = [
            _tokens(encoded),
            _uncertainty(encoded, step, probabilities[step], is_least=step == least),
            _pattern(maps),
            _focus(maps, encoded, step),
        ]
        call = measured_call(request, step, context)
        steps.append(_lens(call, step))
    context.checkpoint(2, 4, "attribution")
    steps += _attribution(call, step, context)
    return {"steps": [asdict(item) for item in steps], "step": step}


def _probabilities(encoded: EncodedInput) -> list[float]:
    """Return the probability of every generated token."""
    logits = encoded.logits(encoded.n_prompt - 1)[: len(encoded.generated_ids)]
    ids = torch.tensor(encoded.generated_ids)
    probabilities: list[float] = logits.softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
    return probabilities


def _tokens(encoded: EncodedInput) -> TourStep:
    """Describe the tokens."""
    n = len(encoded.source_ids) or encoded.n_prompt
    written = len(encoded.generated_ids)
    sentence = f"The text is {n} tokens; the model reads ids, not letters. It wrote {written} tokens, one at a time."
    return TourStep("Tokens", sentence, (TourLink("Show the tokens", "model", {"view": "attention"}),))


def _uncertainty(encoded: EncodedInput, step: int, probability: float, *, is_least: bool) -> TourStep:
    """Describe the explained token and its strongest alternative."""
    logits = encoded.logits(encoded.n_prompt - 1)[step]
    best = logits.softmax(-1).topk(2)
    names = encoded.pipeline.tokenizer.tokens([encoded.generated_ids[step], *best.indices.tolist()])
    other = names[1] if names[1] != names[0] else names[2]
    share = float(best.values[0 if names[1] != names[0] else 1])
    share_text = f"{share:.2f}" if share >= 0.005 else "less than 0.01"
    title = "The least certain token" if is_least else "The selected token"
    sentence = (
        f"{title} is “{names[0].strip()}” with probability {probability:.2f}; the alternative is “{other.strip()}” "
        f"with {share_text}. The next steps are about this token."
    )
    return TourStep(title, sentence, (TourLink("Show the alternatives", "model", {"view": "beams"}),))


def _pattern(maps: Sequence[AttentionMap]) -> TourStep:
    """Describe the head with the clearest positional pattern."""
    score, name, layer_map, head = max(
        (
            (label.scores.get(pattern, 0.0), pattern, layer_map, head)
            for layer_map in maps
            for head, (label, _, _) in enumerate(layer_map.summary.heads)
            for pattern in _POSITIONAL
        ),
        key=lambda row: row[0],
    )
    where = f"{layer_map.title.lower()} head {layer_map.layer}.{head}"
    target = "the token itself" if name == "diagonal" else f"the {name}"
    sentence = f"{where[0].upper()}{where[1:]} attends to {target}: {score:.2f} of its weight is there."
    links = (TourLink("Show this head", "model", _attention_state(layer_map, head, None)),)
    return TourStep("A head with a simple pattern", sentence, links)


def _focus(maps: Sequence[AttentionMap], encoded: EncodedInput, step: int) -> TourStep:
    """Describe the largest attention weight of the position that writes the token, on another token."""
    cross = [layer_map for layer_map in maps if layer_map.kind == "cross"]
    candidates = cross or list(maps)
    row = step if cross else encoded.n_prompt - 1 + step
    best = (-1.0, candidates[0], 0, 0)
    for layer_map in candidates:
        weights = layer_map.all_heads()[:, row]  # (H, S)
        if not cross:
            weights = weights.clone()
            weights[:, row] = 0
            weights[:, 0] = 0  # the first token receives attention that is not needed elsewhere
        place = int(weights.argmax())
        head, key = divmod(place, weights.shape[1])
        best = max(best, (float(weights[head, key]), layer_map, head, key), key=lambda item: item[0])
    weight, layer_map, head, key = best
    token = encoded.pipeline.tokenizer.tokens(encoded.generated_ids[step : step + 1])[0].strip()
    where = f"{layer_map.title.lower()} head {layer_map.layer}.{head}"
    key_token = layer_map.columns[key].strip()
    sentence = f"To write “{token}”, {where} puts {weight:.2f} of its weight on “{key_token}”."
    links = (
        TourLink("Show this head", "model", _attention_state(layer_map, head, row)),
        TourLink("Switch it off", "intervention", {"edits": f"{layer_map.path}:{head}:zero", "step": str(step)}),
    )
    return TourStep("What the model attends to", sentence, links)


def _attention_state(layer_map: AttentionMap, head: int, row: int | None) -> dict[str, str]:
    """Return the state of the attention view with this head."""
    place = f"layer={layer_map.path}&head={head}" + ("" if row is None else f"&row={row}")
    return {"view": "attention", "at": place}


def _lens(call: MeasuredCall, step: int) -> TourStep:
    """Describe after which block the token becomes the top prediction."""
    lens = analysis.logit_lens(call.pipeline.model, call.args, positions=call.position)
    top = lens.top()[0][:, 0, 0, 0].tolist()
    n_blocks = len(lens.layers) - 1
    first = next((i for i in range(len(top)) if all(id_ == call.target for id_ in top[i:])), None)
    token = call.target_name.strip()
    if first is None:
        sentence = f"“{token}” is not the top prediction after the last of {n_blocks} blocks; it was sampled."
    elif first == 0:
        sentence = f"“{token}” is the top prediction already before the first of {n_blocks} blocks."
    else:
        sentence = (
            f"“{token}” is the top prediction from block {first - 1} on, of {n_blocks} blocks (0 to {n_blocks - 1})."
        )
    links = (TourLink("Show the logit lens", "interpret", {"view": "lens", "step": str(step)}),)
    return TourStep("Where the prediction forms", sentence, links)


def _attribution(call: MeasuredCall, step: int, context: RequestContext) -> list[TourStep]:
    """Describe the part with the largest direct contribution, and the model without it."""
    model = call.pipeline.model
    attribution = analysis.attribute(model, call.args, call.metric)
    part = next(part for part in attribution.largest if part.kind in ("head", "feed-forward", "attention"))
    token = call.target_name.strip()
    name = _part_name(part)
    why = (
        f"{name[0].upper()}{name[1:]} adds {part.value:+.2f} to the logit of “{token}”, which is "
        f"{attribution.logit:.2f}: the largest direct contribution of {len(attribution.parts)} parts."
    )
    if part.head is not None:
        why += f" {_source_sentence(call, part.path, part.head)}"
    context.checkpoint(3, 4, "ablation")
    granularity = "module" if part.head is None else "head"
    with torch.no_grad():
        result = analysis.ablate(model, call.args, call.metric, modules=part.path, granularity=granularity)  # type: ignore[arg-type]
        logits = run_logits(model, call.args)
    change = float(result.change[0, part.head or 0])
    before = float(call.metric(logits))
    effect = f"Without {name} the logit of “{token}” changes from {before:.2f} to {before + change:.2f}."
    edits = f"{part.path}:{'' if part.head is None else part.head}:zero"
    return [
        TourStep("Why this token", why, (TourLink("Show all parts", "interpret", {"view": "why", "step": str(step)}),)),
        TourStep("The test", effect, (TourLink("Switch it off", "intervention", {"edits": edits, "step": str(step)}),)),
    ]


@torch.no_grad()
def _source_sentence(call: MeasuredCall, path: str, head: int) -> str:
    """Describe the token from which a head takes most of what it adds."""
    with analysis.trace(call.pipeline.model, f"{path}.weights") as t:
        call.pipeline.model(*call.args)
    share, key = source_shares(call, t, path, head).max(0)
    ids = call.args[0 if path.endswith("cross_attention") else -1][0]
    token = call.pipeline.tokenizer.tokens(ids[key : key + 1].tolist())[0].strip()
    return f"{100 * float(share):.0f} % of what it adds comes from “{token}”."


def _part_name(part: analysis.LogitContribution) -> str:
    """Return the name of a part in a sentence, such as "cross-attention head 3.1"."""
    block, _, name = part.path.rpartition(".")
    stack, _, index = block.rpartition(".blocks.")
    kind = _KINDS.get(name)
    if kind is None or not index.removeprefix("blocks.").isdigit():
        return part.name
    number = index.removeprefix("blocks.")
    where = f"{stack} {kind}" if stack and name != "cross_attention" else kind
    if part.head is not None:
        return f"{where} head {number}.{part.head}"
    return f"the {where}{' network' if name == 'feed_forward' else ''} of block {number}"
