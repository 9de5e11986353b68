// Interventions: a map of all heads, feed-forward networks and blocks, colored by the effect of ablating each of them;
// a click makes an intervention of a cell, and the answer line shows what the model then writes.
import { diffLine } from "./diff.js";
import { heatGrid } from "./heat.js";
import { CausalMap } from "./causal_map.js";
import { answerLine } from "./output.js";
import { saveButton } from "./save.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, button, choices, field, gauge, layerName, make, pane, readState, ready, routeError, slider, status } from "./tools.js";

// edits: the interventions; mt: attention temperature; at: position of the replaced token; layer, head: the weights to show.
const DEFAULTS = { ...SUBJECT, edits: "", source: "", mask: "", mt: 1, at: "", token: "", layer: "", head: "", measure: "logit", step: "" };
const KINDS = [["zero", "Zero ablation"], ["mean", "Mean ablation"], ["scale", "Scale"], ["patch", "Patch"]];
const LABELS = { zero: "zero ablation", mean: "mean ablation", scale: "scaled", patch: "patched", skip: "skipped" };
const SIGNS = { zero: "0", mean: "x̄", scale: "×", patch: "⇄", skip: "↷" };

// Interventions in the address: path, heads, kind, factor, positions, as in blocks.2.attention:0+3:zero or blocks.1::skip
const isEqual = (one, two) => JSON.stringify(one) === JSON.stringify(two);
const parse = (text) => text.split(";").filter(Boolean).map((entry) => {
  const [path, heads = "", kind = "zero", factor = "0", positions = ""] = entry.split(":");
  const numbers = (list) => list.split("+").filter((n) => n !== "").map((n) => (/^\d+$/.test(n) ? Number(n) : n));
  return { path, heads: numbers(heads), kind, factor: Number(factor), positions: numbers(positions) };
});
const format = (specs) => specs.map(({ path, heads, kind, factor, positions }) => [path, heads.join("+"), kind, kind === "scale" ? factor : "", positions.join("+")].join(":").replace(/:+$/, "")).join(";");

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: [...SAMPLING, "head"] }), requests = new Latest(signal), effect = pane("effect"), out = pane("changes"), mapPane = pane("map");
  const tool = { kind: "zero", factor: 0.5 }, save = () => remember(state, DEFAULTS); // what a click does
  const answer = answerLine((step) => { subject.select(step); state.step = String(step); save(); map.load(subject, step); showAnswer(); change({}); });
  const factor = slider("Factor", [-2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1.25, 1.5, 2, 3, 5], 0.5, (value) => { tool.factor = value; }, { min: -100, max: 100 });
  const textField = (label, name, more = {}) => field(label, make("input", { type: "text", value: state[name], on: { input(event) { change({ [name]: event.target.value }); } }, ...more }));
  const source = textField("Source text of patches", "source"), mask = textField("Additional mask (self-attention)", "mask", { className: "code", placeholder: "causal() & window(8, 0)", spellcheck: false });
  const at = textField("Replace the token at position", "at", { className: "typed", inputMode: "numeric" }), token = textField("by the token", "token", { className: "typed" });
  const temperature = slider("Attention temperature", [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 100], state.mt, (mt) => change({ mt }), { min: 0.001, max: 1000 });
  const kinds = choices("Kind of intervention", KINDS, "zero", (kind) => { tool.kind = kind; showTool(); });
  const controls = make("section", { className: "tools" }, make("h3", { textContent: "Click a cell of the map to apply" }), kinds, factor, source, make("details", { className: "sampling", open: Boolean(state.mask || state.at || state.mt !== 1) }, make("summary", { textContent: "Mask, temperature, tokens" }), make("div", {}, temperature, mask, at, token)));
  const undo = button("Undo all", () => reset()), omitted = make("p", { className: "problem omitted", role: "alert" });
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0, controls: [controls], onModel: dropUnknown, onRun, onFail: fail, onLoading: loading });
  const map = new CausalMap(mapPane, signal, { onClick: toggleCell, onShown: markCells, measure: state.measure, onMeasure: (measure) => { state.measure = measure; save(); } });
  modelLayout(box, subject, answer, make("div", { className: "bar stage-bar" }, make("p", { className: "note", textContent: "Which part of the model writes the selected token? Select a token above, then click a cell to switch that part off." }), make("div", { className: "form tight" }, undo, saveButton("interventions"))), omitted, make("div", { className: "map-row" }, mapPane, effect), out);
  const fields = { mask, patch_text: source, replacement: token, target_position: at };
  let result = null;

  function loading() { effect.loading(); out.loading(""); }
  function fail({ message }) { effect.fail(message); out.fail(""); }

  // Why the model cannot apply an intervention, or "".
  function problemOf({ path, heads, kind }) {
    const { name, layers } = subject.model, layer = layers.find((candidate) => candidate.path === path), isPart = layer || layers.some((other) => path === other.path.replace(/\.[^.]+$/, "") || path === other.path.replace(/[^.]+$/, "feed_forward"));
    if (!isPart) return `“${path}” is not a part of ${name}`;
    if (!(kind in LABELS)) return `“${kind}” is not a kind of intervention`;
    const unknown = heads.find((head) => !(head < (layer?.n_heads ?? 0)));
    return unknown === undefined ? "" : `${path} has no head ${unknown}`;
  }

  // Omit the interventions that the model does not have, as after a change of the model, and say so.
  function dropUnknown() {
    const specs = parse(state.edits), problems = specs.map(problemOf);
    state.edits = format(specs.filter((_, i) => !problems[i]));
    omitted.textContent = problems.filter(Boolean).map((problem) => `${problem}; this intervention is omitted.`).join(" ");
  }

  function showTool() {
    factor.hidden = tool.kind !== "scale";
    source.hidden = tool.kind !== "patch" && !parse(state.edits).some(({ kind }) => kind === "patch");
  }

  function onRun(run) {
    result = null;
    const step = subject.stepOf(state.step) ?? subject.shownStep;
    subject.step = subject.stepOf(step);
    subject.showCandidates();
    showAnswer();
    map.load(subject, step);
    change({});
  }

  function showAnswer() {
    answer.show(subject.last, subject.step);
    answer.querySelector(".now-writes")?.remove();
    const line = make("p", { className: "now-writes answer-output", ariaLive: "polite" });
    if (result && state.edits + state.mask + state.at && result.now_writes !== null) line.append(make("small", { textContent: result.now_writes === result.writes ? "still writes " : "now writes " }), diffLine(result.writes, result.now_writes));
    answer.append(line);
  }

  function reset() {
    Object.assign(state, { edits: "", mask: "", mt: 1, at: "", token: "", source: "" });
    for (const boxed of [mask, source, at, token]) boxed.querySelector("input").value = "";
    temperature.set(1);
    omitted.textContent = "";
    change({});
  }

  // Add an intervention on one head or module, or remove it. The interventions on other heads stay as they are.
  function toggleCell({ path, head, isBlock }) {
    const kind = isBlock && tool.kind === "zero" ? "skip" : tool.kind, made = { path, kind, factor: kind === "scale" ? tool.factor : 0, positions: [] };
    const key = (spec) => `${spec.path} ${spec.kind} ${spec.factor}`, specs = parse(state.edits);
    const old = specs.find((spec) => spec.path === path && (head === null ? !spec.heads.length : spec.heads.includes(head)));
    if (old) old.heads = old.heads.filter((i) => i !== head);
    let rest = specs.filter((spec) => spec !== old || old.heads.length);
    if (!old || key(old) !== key(made)) {
      const same = head === null ? null : rest.find((spec) => spec.heads.length && key(spec) === key(made));
      if (same) same.heads = [...same.heads, head].sort((a, b) => a - b);
      else rest = [...rest, { ...made, heads: head === null ? [] : [head] }];
    }
    omitted.textContent = "";
    change({ edits: format(rest) });
  }

  function markCells() {
    const specs = parse(state.edits);
    map.mark(({ path, head }) => {
      const spec = specs.find((candidate) => candidate.path === path && (head === null ? !candidate.heads.length : candidate.heads.includes(head)));
      return spec ? { label: LABELS[spec.kind] + (spec.kind === "scale" ? ` by ${spec.factor}` : ""), sign: SIGNS[spec.kind] } : null;
    });
  }

  function change(changes) {
    Object.assign(state, changes);
    save();
    showTool();
    undo.disabled = !(state.edits || state.mask || state.at || state.mt !== 1);
    if (!subject.last) return;
    markCells();
    for (const boxed of Object.values(fields)) boxed.problem("");
    const isPosition = /^\d+$/.test(state.at.trim());
    if (state.at !== "" && !isPosition) at.problem(`expected a position, a whole number from 0 to ${subject.last.ids.length - 1}; the token is not replaced`);
    loading();
    const body = { ...subject.input, chat: subject.hasChat, interventions: parse(state.edits), patch_text: state.source, mask: state.mask, attention_temperature: state.mt, temperature: subject.setting("t", "temperature"), seed: Number(state.seed),
      target_position: isPosition ? Number(state.at) : null, replacement: state.token, layer: state.layer, head: state.head === "" ? null : Number(state.head), step: subject.step };
    requests.run((stop) => ask("intervene", body, { signal: stop }), (arrived) => { result = arrived; showAnswer(); show(arrived); }, (error) => { routeError(error, fields, (message) => fail({ message })); ready("error"); });
  }

  function show({ before, after, changes, python }) {
    const layers = subject.model.layers.map(({ path }) => path), nHeads = subject.model.layers.find(({ path }) => path === before.layer)?.n_heads ?? 0;
    const layer = field("Layer", make("select", { on: { change(event) { change({ layer: event.target.value, head: "" }); } } }, ...layers.map((path) => make("option", { value: path, textContent: layerName(path), selected: path === before.layer }))));
    const head = field("Head", make("select", { on: { change(event) { change({ head: event.target.value }); } } }, make("option", { value: "", textContent: "mean" }), ...Array.from({ length: nHeads }, (_, i) => make("option", { value: i, textContent: i, selected: String(i) === String(state.head) }))));
    const isSame = isEqual(before.weights, after.weights), logits = changes.logits, hasChanged = logits.kl_largest > 0, isEdited = !undo.disabled, activations = [...changes.outputs.filter(({ path }) => path), ...changes.weights].filter(({ mean }) => mean !== 0);
    const largest = Math.max(1e-12, ...activations.map(({ mean }) => mean ?? 0));
    const side = (...parts) => make("section", { className: "side" }, ...parts), sides = (one, two) => make("div", { className: "sides" }, side(...one), isEdited && two ? side(...two) : null);
    const kl = make("div", { className: "chips" }, ...after.tokens.map((text, i) => {
      const chip = make("span", { title: changes.kl[i] === undefined ? "" : `KL divergence of the prediction after this token: ${changes.kl[i] === null ? "∞" : changes.kl[i].toPrecision(2)} nats` }, text);
      chip.dataset.token = `t${i}`;
      chip.style.setProperty("--w", `${Math.round(60 * Math.min(1, changes.kl[i] ?? 0))}%`);
      return chip;
    }));
    effect.show(make("p", { className: "kind" }, hasChanged ? make("b", { textContent: `The top prediction changes at ${logits.top1_changed} of ${logits.positions} positions; ` }) : isEdited ? "No change." : "No intervention yet: click a cell of the map.", hasChanged ? `the largest KL divergence is ${logits.kl_largest.toPrecision(3)} nats. Tokens after which the prediction changes are shaded.` : "", isEdited && result.now_writes === result.writes ? " The text stays the same, because other parts do the same work: click more orange cells." : ""), hasChanged ? kl : null,
      side(isEdited ? bars(after.candidates, before.candidates) : bars(before.candidates, null)));
    out.show(make("h3", { textContent: "Attention weights" }), make("div", { className: "form" }, layer, head),
      isEdited && isSame ? make("p", { className: "note", textContent: "The interventions leave these weights as they are; a head is switched off after its weights are computed." }) : null,
      isSame ? weights(before, isEdited ? "Original and with interventions" : "Original") : sides([weights(before, "Original")], [weights(after, "With interventions")]),
      make("div", { className: "top-gap" }, activations.length ? make("table", { className: "plain gauges" }, make("caption", { textContent: "How far the rest of the model changes: relative change of each output, share of attention that moved (means over positions)" }), make("tbody", {}, ...activations.map(({ path, kind, mean }) =>
        make("tr", {}, make("th", { scope: "row", title: path, textContent: `${layerName(path)} ${kind}` }), gauge((mean ?? largest) / largest), make("td", { textContent: mean === null ? "∞" : mean.toPrecision(3) }))))) : null, make("div", {}, make("h3", { textContent: "The same in Python" }), make("pre", { className: "python", tabIndex: 0, textContent: python }),
        button("Copy", async () => { await navigator.clipboard.writeText(python).then(() => status("copied"), () => status("the browser does not allow copying; select the text instead")); }))));
    ready(`intervention ${logits.top1_changed} ${logits.kl_largest.toPrecision(3)}`);
  }

  // The weights of one pass, with the tokens of rows and columns; of a long text, every n-th.
  function weights(pass, title) {
    const isCross = pass.layer.endsWith("cross_attention"), isSource = pass.layer.startsWith("encoder"), rowTokens = isSource ? pass.source : isCross ? pass.tokens.slice(1) : pass.tokens, columnTokens = isSource || isCross ? pass.source : pass.tokens;
    const labels = (tokens, length, name, shift) => Array.from({ length }, (_, i) => { const k = Math.floor((i * Math.max(tokens.length, length)) / length); return { label: tokens[k]?.trim() || tokens[k] || (isCross ? "next" : String(k)), token: `${name}${k + shift}` }; });
    const values = pass.weights.map((row) => row.map((code) => (code / 255) ** 2));
    return heatGrid({ caption: `${title}: ${layerName(pass.layer)}, ${pass.head === null ? "mean over heads" : `head ${pass.head}`}. ${isCross ? "A row is the token about to be written." : "A row is the token that attends."}`, corner: "query ↓ key →", signed: false, largest: 1, className: values.length > 24 ? "tiny" : "small",
      rows: labels(rowTokens, values.length, isSource ? "s" : "t", isCross ? 1 : 0), columns: labels(columnTokens, values[0].length, isSource || isCross ? "s" : "t", 0), values });
  }

  const bars = (candidates, original) => make("table", { className: "plain probabilities" }, make("caption", { textContent: `${subject.step === null ? "Next token" : `Output token ${subject.step + 1}`}: probabilities${original ? " with the interventions (tick: original)" : ""}` }), make("tbody", {},
    ...candidates.map(({ id, token: text, probability }) => make("tr", {}, make("th", { scope: "row", textContent: text }), gauge(probability, original?.find((candidate) => candidate.id === id)?.probability ?? null), make("td", { textContent: probability >= 0.001 ? probability.toFixed(3) : "<0.001" })))));

  subject.open();
}
