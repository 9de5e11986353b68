"""From the calls of a run to the stations of a walk. The numbers are the run's own, and so is the order: nothing here
knows a model.

A station is a module's output, a step inside an attention layer (recomputed from what it was given), or something that
the model's code does between its modules. That last kind is found by its numbers: if what a module is given is the sum
of two earlier results, to the bit, then they were added. So pre-norm, post-norm and parallel blocks show as they are.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.attention import ScaledDot
from clearhead.look.recompute import scores_of
from clearhead.look.trace import Trace
from clearhead.look.visits import Visit, same

__all__ = ["Guide", "Line", "Station"]

Known = list[tuple[Tensor, int]]
"""What has been computed so far in one module, and by which station."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Station:
    """One thing that happens on the way, with the numbers of the run.

    `values` are those of one sequence, without the batch: a row a token, or a matrix a head, as `letters` say."""

    name: str
    role: str  # its kind, the same in every model: "embedding", "q", "scores", "add", …
    where: str  # the module path
    group: str  # the path of the block or stack that it is in
    formula: str
    letters: tuple[str, ...]  # what each dimension of the values counts
    why: str
    values: Tensor
    rows: tuple[str, ...] = ()  # the tokens along the rows
    columns: tuple[str, ...] = ()  # and along the columns, where these are tokens too
    cells: tuple[tuple[str, ...], ...] = ()  # words that belong to the values, where there are any
    sources: tuple[int, ...] = ()  # the numbers of the stations that this one is made from
    branch: str = ""  # "self-attention", "masked self-attention", "cross-attention", "feed-forward"
    note: str = ""  # what is particular here

    @property
    def kind(self) -> str:
        """How it is shown: "vectors", "maps" (a matrix a head), "ids", "words" or "image"."""
        return _KINDS.get(self.role, "vectors")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def size(self) -> str:
        """The shape in letters and in numbers: "(H, T, S) = (8, 5, 4)"."""
        return f"({', '.join(self.letters)}) = ({', '.join(f'{n:,}' for n in self.shape)})"


_KINDS = {
    **dict.fromkeys(("bias", "scores", "mask", "weights"), "maps"),
    **dict.fromkeys(("characters", "tokens", "start"), "ids"),
    **dict.fromkeys(("softmax", "next", "answer"), "words"),
    "pixels": "image",
}


class Line(NamedTuple):
    """A line of tokens: the letter for its length, their names, and how many were given (the others were written)."""

    letter: str
    tokens: Sequence[str]
    given: int


@cache
def texts() -> dict[str, dict[str, str]]:
    """What is said at each kind of station."""
    return tomllib.loads((Path(__file__).parent / "assets" / "stations.toml").read_text(encoding="utf-8"))


class Guide:
    """Goes through the calls of a traced run and notes a station for each thing that happens.

    `lines` are the tokens by the beginning of module paths, the first that fits counts: {"encoder": …, "": …}."""

    def __init__(self, trace: Trace, lines: Mapping[str, Line]) -> None:
        self._trace, self._lines = trace, lines
        self._made: list[Station] = []
        self._fills: list[dict[str, str]] = []  # for the formulas' places, which are known when all has been seen
        self._ends: Known = []  # what stacks and blocks gave: a memory is one of these
        self._last: Tensor | None = None  # what the model itself gave
        self.sizes: dict[str, int] = {}

    @property
    def stations(self) -> list[Station]:
        """All that was noted, with every formula filled in."""
        stream = {station.sources[0] for station in self._made if station.role == "add"}
        ends = {i for _, i in self._ends}
        post = {i for i, one in enumerate(self._made) if one.role == "norm" and one.letters[-1] == "M"} & (
            stream | ends
        )

        def letter(i: int) -> str:
            """h for what a norm has made ready, x for the stream itself."""
            return "h" if self._made[i].role == "norm" and i not in post else "x"

        done = []
        for i, (one, fill) in enumerate(zip(self._made, self._fills, strict=True)):
            own = letter(i) if one.role == "norm" else letter(one.sources[0]) if one.sources else "x"
            done.append(replace(one, formula=one.formula.format_map({"h": own, **fill})))
        for i, one in enumerate(done):
            if one.role == "add":
                parts = [_branch_of(done[j]) for j in one.sources[1:]]
                done[i] = replace(one, formula=one.formula.replace("…", " + ".join(parts)))
        return done

    def note(self, role: str, values: Tensor, letters: str, **details: Any) -> int:
        """Put down a station and give its number; `letters` are those of its dimensions, with blanks between."""
        said, fill = texts()[role], details.pop("fill", {})
        details.setdefault("why", said["why"])
        formula = details.pop("formula", said["formula"])
        names = tuple(letters.split())
        self.sizes.update({name: n for name, n in zip(names, values.shape, strict=True) if not name.isdigit()})
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        one = Station(role=role, letters=names, values=values, **{"name": said["name"], "formula": formula} | details)
        self._made.append(one)
        self._fills.append(fill)
        return len(self._made) - 1

    def walk(self, visit: Visit) -> None:
        """All of one call of the model."""
        self._last = visit.gave
        self._follow(visit, visit.path, len(self._made) - 1)

    # -- modules ------------------------------------------------------------------------------------------------------

    def _follow(self, visit: Visit, group: str, source: int | None) -> int:
        """The calls that a stack or a block makes, and what it does between them; the number of what it gave."""
        known: Known = []
        if visit.given and _is_stream(visit.given[0]) and source is not None and source >= 0:
            known.append((visit.given[0], source))
        for part in visit.parts:
            if part.quiet or part.gave is None:
                continue
            source = None
            if part.given and _is_stream(part.given[0]):
                source = self._arrive(part.given[0], known, visit, group)
            if part.path in self._trace.paths:
                number = self._attention(part, source, group)
            elif any(inner.path in self._trace.paths for inner in part.all):
                number = self._follow(part, part.path, source)
            else:
                number = self._unit(part, source, group)
            known.append((part.gave, number))
        number = len(self._made) - 1
        if visit.gave is not None and known:
            number = self._arrive(visit.gave, known, visit, group)
            self._ends.append((visit.gave, number))
        return number

    def _number_of(self, x: Tensor) -> int:
        """The station that a tensor comes from; the latest, where it is none that is known."""
        return next((i for tensor, i in reversed(self._ends) if same(tensor, x)), len(self._made) - 1)

    def _unit(self, part: Visit, source: int | None, group: str) -> int:
        """A module without attention inside: one station, or two for a feed-forward."""
        x = part.gave
        assert x is not None
        kind, line = type(part.module).__name__.lower(), self._line(part.path)
        common: dict[str, Any] = {"where": part.path, "group": group, "sources": () if source is None else (source,)}
        matrices = [one for one in part.all if _is_matrix(one.module)]
        if not part.given:
            rows = tuple(line.tokens)
            sizes = {"rows": rows, "columns": rows}
            return self.note("bias", x.reshape(-1, *x.shape[-2:]), f"H {line.letter} {line.letter}", **sizes, **common)
        if isinstance(part.module, nn.Embedding) and not part.given[0].is_floating_point():
            first = self._ids(part, line, group)
            scale = float(getattr(part.module, "scale", 1.0))
            fill = {"scale": "" if scale == 1 else " · √M"}
            return self._vectors("embedding", x, line, fill=fill, **common | {"sources": (first,)})
        if part.given[0].dim() == 4:
            return self._vectors("patches", x, line, **common | {"sources": tuple(range(len(self._made)))[-1:]})
        if "norm" in kind:
            return self._vectors("norm", x, line, fill={"norm": _norm(part.module)}, **common)
        if "position" in kind + part.name:
            choice = getattr(part.module, "choice", part.module)
            told = texts().get(f"position_{type(choice).__name__.lower()}", {})
            return self._vectors("position", x, line, note=_places(part, choice), **told, **common)
        if len(matrices) > 1:
            return self._feed_forward(part, matrices, line, common)
        if self._last is not None and same(x, self._last):
            return self._logits(x, line, "{h} W" + _bias(part.module), common)
        return self._vectors("linear" if matrices else "between", x, line, **common)

    def _ids(self, part: Visit, line: Line, group: str) -> int:
        """The ids that an embedding is given: what a text has become, or what a decoder has written so far."""
        writes = line.letter == "T" and any(other.letter == "S" for other in self._lines.values())
        ids, note = part.given[0][0], ""
        if not writes and line.given < len(ids):
            note = (
                f"The first {line.given} were given; the model wrote the others, one at a time, and read each in turn."
            )
        role = "start" if writes else "tokens"
        return self.note(role, ids, line.letter, where=part.path, group=group, rows=tuple(line.tokens), note=note)

    def _vectors(self, role: str, x: Tensor, line: Line, last: str = "M", **details: Any) -> int:
        """A row a token, or one for all of them where the tokens have become one."""
        x = x[0]
        if last == "M" and self.sizes.get("M", x.shape[-1]) != x.shape[-1]:
            last = "F"
        if x.dim() == 1:
            return self.note(role, x, last, **details)
        rows = tuple(line.tokens[-len(x) :])  # patches have no [CLS] before them yet
        letter = line.letter if len(x) == len(line.tokens) else "N"
        return self.note(role, x, f"{letter} {last}", rows=rows, **details)

    def _feed_forward(self, part: Visit, matrices: list[Visit], line: Line, common: dict[str, Any]) -> int:
        hidden, down = matrices[-1].given[0], matrices[-1]
        activation = getattr(part.module, "activation", None)
        name = re.sub(r"\W.*", "", str(activation)) if activation is not None else "activation"
        inside = f"{name}({{h}} W₁{_bias(matrices[0].module, '1')})"
        if len(matrices) > 2:
            inside = "activation({h} W_gate) · ({h} W₁)"
        common = common | {"branch": "feed-forward"}
        where = {"where": down.path}
        note = f"{name}; {float((hidden > 0).float().mean()):.0%} of the hidden features are above zero."
        wide = self._vectors("hidden", hidden, line, "F", formula=f"hidden = {inside}", note=note, **common)
        form = f"feed_forward({{h}}) = hidden W₂{_bias(down.module, '2')}"
        number = self._vectors("feed_forward", part.gave, line, formula=form, **common | where)  # type: ignore[arg-type]
        self._made[number] = replace(self._made[number], sources=(*common["sources"], wide))
        return number

    # -- inside an attention layer ------------------------------------------------------------------------------------

    def _attention(self, part: Visit, source: int | None, group: str) -> int:
        call, path = self._trace.given(part.path), part.path
        everyone, rows = list(range(call.q.shape[-3])), list(range(call.T))
        scores, allowed = scores_of(call, everyone, rows, torch.promote_types(call.q.dtype, torch.float32))
        others = [x for x in part.given[1:] if _is_stream(x) and x.dim() == part.given[0].dim()]
        cross = bool(others) and not same(others[0], part.given[0])
        line = self._line(path)
        keys = next((one for one in self._lines.values() if one.letter == "S"), line) if cross else line
        memory = self._number_of(others[0]) if cross else source
        hides = allowed is not None and not bool(allowed.all())
        branch = "cross-attention" if cross else "masked self-attention" if hides else "self-attention"
        names = {"rows": tuple(line.tokens[: call.T]), "columns": tuple(keys.tokens[: call.S])}
        common = {"group": group, "branch": branch}
        T, S, K = line.letter, keys.letter, "H" if call.groups == 1 else "K"

        made = {}
        for role, x, letters, where, start in (
            ("q", call.q, f"H {T} D", line, source),
            ("k", call.k, f"{K} {S} D", keys, memory),
            ("v", call.v, f"{K} {S} D", keys, memory),
        ):
            projection = next((one for one in part.parts if one.name == f"{role}_proj"), None)
            formula = texts()[role]["formula"] + ("" if projection is None else _bias(projection.module, role.upper()))
            made[role] = self.note(
                role,
                _one(x, 3),
                letters,
                where=path if projection is None else projection.path,
                rows=tuple(where.tokens[: x.shape[-2]]),
                sources=() if start is None else (start,),
                formula=formula.replace("{h}", "memory") if cross and role != "q" else formula,
                why=texts()[f"{role}_cross" if cross else role]["why"],
                note=_turned(x, projection, part.module),
                **common,
            )
        fill = {"scores": "q kᵀ / √D" if isinstance(call.scores, ScaledDot) else f"{call.scores}(q, k)"}
        if call.bias is not None:
            fill["scores"] += " + bias"
        maps = {"where": path, **names, **common}
        added = [i for i, one in enumerate(self._made) if one.role == "bias" and call.bias is not None][-1:]
        both = (made["q"], made["k"], *added)
        at = self.note("scores", _one(scores, 3), f"H {T} {S}", sources=both, fill=fill, **maps)
        seen = torch.ones(1, call.T, call.S, dtype=torch.bool) if allowed is None else allowed
        seen = _one(seen.expand(*seen.shape[:-2], call.T, call.S), 3)
        at = self.note(
            "mask", seen, f"{'H' if len(seen) > 1 else '1'} {T} {S}", sources=(at,), **_told(call, seen, cross), **maps
        )
        weights = _one(self._trace.weights(path), 3)
        at = self.note("weights", weights, f"H {T} {S}", sources=(at,), **maps)
        heads = _one(self._trace.heads(path), 3)
        own = {"where": path, "rows": names["rows"], **common}
        at = self.note("heads", heads, f"H {T} D", sources=(at, made["v"]), **own)
        out = next((one for one in reversed(part.parts) if _is_matrix(one.module)), part)
        form = (
            f"attention({'{h}' if not cross else '{h}, memory'}) = concat(head₁, …, head_H) W_O{_bias(out.module, 'O')}"
        )
        assert part.gave is not None
        before = () if source is None else (source,)
        return self._vectors("out", part.gave, line, where=out.path, sources=(*before, at), formula=form, **common)

    # -- between modules ----------------------------------------------------------------------------------------------

    def _arrive(self, x: Tensor, known: Known, visit: Visit, group: str) -> int:
        """The station whose values these are, or a new one that says how they came about."""
        for tensor, number in reversed(known):
            if same(tensor, x):
                return number
        common = {"where": visit.path, "group": group}
        line = self._line(visit.path)
        alike = [(tensor, number) for tensor, number in known if tensor.shape == x.shape]
        for count in (2, 3):
            for some in itertools.combinations(alike, count):
                for order in itertools.permutations(some) if count > 2 else (some,):
                    if _equal(sum(tensor for tensor, _ in order), x):  # type: ignore[arg-type]
                        numbers = tuple(sorted(number for _, number in some))
                        at = self._vectors("add", x, line, sources=numbers, fill={"sum": "x + …"}, **common)
                        known.append((x, at))
                        return at
        for tensor, number in reversed(known):
            found = self._reshaped(x, tensor, number, line, common)
            if found is not None:
                known.append((x, found))
                return found
        sources = tuple(number for _, number in known[-1:])
        note = ""
        if known and known[-1][0].shape == x.shape and x.dim() == 3:
            change = x - known[-1][0]
            if _equal(change, change[:, :1].expand_as(change), float(x.abs().max())):
                note = "Here the same vector was added to every token."
        known.append((x, self._vectors("between", x, line, sources=sources, note=note, **common)))
        return known[-1][1]

    def _reshaped(self, x: Tensor, before: Tensor, number: int, line: Line, common: dict[str, Any]) -> int | None:
        """x made from an earlier result by putting tokens in front, by pooling, or by a tied table of words."""
        common = common | {"sources": (number,)}
        if before.dim() != 3:
            return None
        if x.dim() == 3 and x.shape[1] > before.shape[1] and same(x[:, -before.shape[1] :], before):
            return self._vectors("front", x, line, **common)
        for pooled, how in ((before.mean(1), f"mean over {line.letter} of x"), (before[:, 0], "the first token's x")):
            if x.shape == pooled.shape and _equal(pooled, x):
                return self._vectors("pool", x, line, fill={"pooled": how}, **common)
        for weight in self._trace.module("").parameters():
            if weight.shape == (x.shape[-1], before.shape[-1]) and _equal(F.linear(before, weight.detach()), x):
                return self._logits(x, line, "{h} Eᵀ", common)
        return None

    def _logits(self, x: Tensor, line: Line, formula: str, common: dict[str, Any]) -> int:
        return self._vectors("logits", x, line, "V", formula=f"logits = {formula}", **common)

    def _line(self, path: str) -> Line:
        return next(line for start, line in self._lines.items() if path.startswith(start))


def _is_matrix(module: nn.Module) -> bool:
    """Whether it is a linear map by itself: torch's, or another that has one matrix and is no table of embeddings."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _is_stream(x: Tensor) -> bool:
    return x.is_floating_point() and x.dim() in (2, 3)


def _one(x: Tensor, dims: int) -> Tensor:
    """The first sequence of a batch."""
    return x.reshape(-1, *x.shape[-dims:])[0] if x.dim() >= dims else x.reshape(*[1] * (dims - x.dim()), *x.shape)


def _equal(a: Tensor, b: Tensor, largest: float = 0.0) -> bool:
    """Equal but for rounding: a sum of three in another order rounds twice, each time by half a unit of the largest."""
    if a.shape != b.shape or not a.numel():
        return False
    unit = torch.finfo(b.dtype).eps
    return float((a.double() - b.double()).abs().max()) <= 2 * unit * max(largest, float(b.abs().max()))


def _bias(module: nn.Module, letter: str = "") -> str:
    has = getattr(module, "bias", None) is not None
    mark = {"": "", "1": "₁", "2": "₂"}.get(letter, f"_{letter}")
    return f" + b{mark}" if has else ""


def _norm(module: nn.Module) -> str:
    scale = " · γ" + (" + β" if getattr(module, "bias", None) is not None else "")
    if "rms" in type(module).__name__.lower():
        return "x / √(mean(x²) + ε)" + scale
    return "(x − mean(x)) / √(var(x) + ε)" + scale


def _places(part: Visit, choice: Any) -> str:
    """What a module of positions says about itself, and how much it adds."""
    assert part.gave is not None
    added = (part.gave - part.given[0])[0].float()
    start = ", ".join(f"{value:.3f}" for value in added[-1, :4].tolist())
    length = float(added[-1].norm())
    return f"{type(choice).__name__}: added to the last token was P = [{start}, …], of length {length:.3g}."


def _turned(x: Tensor, projection: Visit | None, layer: nn.Module) -> str:
    """Whether queries or keys are something else than the projection gave: turned by their place, or normalised."""
    if projection is None or projection.gave is None or projection.gave.numel() != x.numel():
        return ""
    before = projection.gave.unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-2, -3)
    if same(before, x):
        return ""
    rotary = getattr(layer, "rotary", None)
    how = "changed after the product"
    if rotary is not None:
        how = f"turned by an angle that grows with the token's place ({rotary}), so that q · k depends on distance"
    if getattr(layer, "q_norm", None) is not None:
        how = f"normalised in every head, and {how}"
    return how[0].upper() + how[1:] + "."


def _told(call: Any, seen: Tensor, cross: bool) -> dict[str, str]:
    """What this mask is, and why."""
    said = texts()
    T, S = seen.shape[-2:]
    open_ = int(seen[0].sum())
    causal = (
        T == S and not cross and bool((seen == torch.ones(T, S, dtype=torch.bool, device=seen.device).tril()).all())
    )
    key = "mask_causal" if causal else "mask_cross" if cross else "mask_full" if open_ == T * S else "mask_other"
    name = "full()" if call.mask is None else str(call.mask)
    return {"why": said[key]["why"], "note": f"{name}: {open_:,} of {T * S:,} pairs may attend."}


def _branch_of(station: Station) -> str:
    """How the result of a station is written in a sum."""
    if station.role in ("out", "feed_forward"):
        return station.formula.partition(" = ")[0]
    return {"norm": "norm(…)", "linear": "y"}.get(station.role, "y")
