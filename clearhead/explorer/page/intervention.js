// Interventions: the same text without and with interventions on the model, the differences, and a Python script.
import { Latest, ask, cells, choices, field, gauge, make, ready, saveButtons, slider, status } from "./tools.js";

// t: temperature; at: target position; token: its replacement; layer, head: the weights to show.
const DEFAULTS = { model: "", text: "", edits: "", source: "", mask: "", t: 1, at: "", token: "", layer: "", head: "" };
const LABELS = { zero: "zero ablation", scale: "scaled", patch: "patched" };

// An intervention in the address: path, heads, kind, as in blocks.2.attention:0+3:zero or blocks.1::scale:0.5
const parse = (text) => text.split(";").filter(Boolean).map((entry) => {
  const [path, heads = "", kind = "zero", factor = "0", positions = ""] = entry.split(":");
  const numbers = (list) => list.split("+").filter((n) => n !== "").map(Number);
  return { path, heads: numbers(heads), kind, factor: Number(factor), positions: numbers(positions) };
});
const format = (specs) => specs.map(({ path, heads, kind, factor, positions }) => [path, heads.join("+"), kind, factor, positions.join("+")].join(":").replace(/:+$/, "")).join(";");

export function open(box, initial, { signal, remember }) {
  const state = { ...DEFAULTS, ...initial, t: Number(initial.t) || 1 }, latest = new Latest(signal), listing = new Latest(signal);
  const pick = make("select", { on: { change() { selectModel(pick.value); } } });
  const textField = (label, name, more = {}) => field(label, make("input", { type: "text", value: state[name], on: { input(event) { go({ [name]: event.target.value }); } }, ...more }));
  const text = make("textarea", { rows: 2, value: state.text, on: { input() { go({ text: text.value }); } } });
  const grid = make("div", { className: "switches" }), errorBox = make("p", { className: "caret", role: "alert" }), out = make("div");
  const mask = textField("Additional mask (self-attention)", "mask", { className: "code", placeholder: "causal() & window(8, 0)" });
  const source = textField("Source text of patches", "source"), at = textField("Target position", "at", { className: "typed", inputMode: "numeric" }), token = textField("Replacement token", "token", { className: "typed" });
  const temperature = slider("Attention temperature", [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 100], state.t, (t) => go({ t }));
  const kindButtons = choices("Kind of intervention", [["zero", "Zero"], ["scale", "Scale"], ["patch", "Patch"]], "zero", (name) => { tool.kind = name; factor.hidden = name !== "scale"; });
  const factor = slider("Factor", [-2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1.25, 1.5, 2, 3, 5], 0.5, (value) => { tool.factor = value; });
  factor.hidden = true;
  const tool = { kind: "zero", factor: 0.5 }; // what a click does
  box.append(make("h1", { textContent: "Interventions" }),
    make("p", { className: "lead", textContent: "Set heads or blocks to zero, scale them, or patch them from another text; add a mask, change the temperature, or replace a token. Both forward passes are shown next to each other." }),
    make("div", { className: "form" }, field("Model", pick), make("div", { className: "field grow" }, field("Text", text))),
    make("div", { className: "form" }, kindButtons, factor, make("button", { type: "button", className: "act", textContent: "Undo all", on: { click() { reset(); } } })),
    grid, make("div", { className: "form" }, temperature, mask, source, at, token), errorBox, out);
  let models = [], model = null;

  function selectModel(name, keepState = false) {
    model = models.find((candidate) => candidate.name === name) ?? models[0];
    if (!keepState) Object.assign(state, DEFAULTS);
    state.text ||= model.examples[0];
    text.value = state.text;
    go({ model: model.name });
  }

  function reset() {
    Object.assign(state, { edits: "", mask: "", t: 1, at: "", token: "", source: "" });
    for (const boxed of [mask, source, at, token]) boxed.querySelector("input").value = "";
    temperature.set(1);
    go({});
  }

  // Add an intervention on a head or a module, or remove it.
  function toggleIntervention(path, head) {
    const specs = parse(state.edits), isSame = (spec) => spec.path === path && (head === null ? !spec.heads.length : spec.heads.length > 0);
    const old = specs.find(isSame), others = specs.filter((spec) => !isSame(spec));
    if (head === null) return go({ edits: format(old ? others : [...others, { path, heads: [], ...tool, positions: [] }]) });
    const heads = old?.heads.includes(head) ? old.heads.filter((i) => i !== head) : [...(old?.heads ?? []), head].sort((a, b) => a - b);
    go({ edits: format(heads.length ? [...others, { path, heads, ...tool, positions: old?.positions ?? [] }] : others) });
  }

  function showSwitches() {
    const specs = parse(state.edits), focus = grid.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const button = (text, path, head, label) => {
      const spec = specs.find((candidate) => candidate.path === path && (head === null ? !candidate.heads.length : candidate.heads.includes(head)));
      const element = make("button", { type: "button", textContent: text, title: label, ariaLabel: `${label}${spec ? `: ${LABELS[spec.kind]}` : ""}`, className: spec?.kind ?? "", on: { click() { toggleIntervention(path, head); } } });
      element.setAttribute("aria-pressed", String(Boolean(spec)));
      element.dataset.key = `${path}/${head}`;
      return element;
    };
    grid.replaceChildren(...model.layers.map(({ path, n_heads: nHeads }) => make("div", { className: "layer" }, make("span", { className: "note code", textContent: path }),
      ...Array.from({ length: nHeads }, (_, head) => button(head, path, head, `${path}, head ${head}`)),
      button("all", path, null, `${path}, the whole layer`),
      ...(path.endsWith("cross_attention") ? [] : [button("feed-forward", path.replace(/[^.]+$/, "feed_forward"), null, `the feed-forward network after ${path}`), button("block", path.replace(/\.[^.]+$/, ""), null, `${path.replace(/\.[^.]+$/, "")}, the whole block`)]))));
    if (focus) grid.querySelector(`[data-key="${focus}"]`)?.focus();
  }

  function go(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!model) return;
    showSwitches();
    const body = { model: model.name, text: state.text, interventions: parse(state.edits), patch_text: state.source, mask: state.mask, temperature: state.t,
      target_position: state.at === "" ? null : Number(state.at), replacement: state.token, layer: state.layer, head: state.head === "" ? null : Number(state.head) };
    latest.run((stop) => ask("intervene", body, { signal: stop }), show, (error) => { errorBox.textContent = error.message; out.classList.add("old"); ready("error"); });
  }

  function show({ before, after, changes, python }) {
    errorBox.textContent = "";
    out.classList.remove("old");
    const layers = model.layers.map(({ path }) => path), nHeads = model.layers.find(({ path }) => path === before.layer)?.n_heads ?? 0;
    const layer = field("Layer", make("select", { on: { change(event) { go({ layer: event.target.value, head: "" }); } } }, ...layers.map((path) => make("option", { value: path, textContent: path, selected: path === before.layer }))));
    const head = field("Head", make("select", { on: { change(event) { go({ head: event.target.value }); } } }, make("option", { value: "", textContent: "mean" }), ...Array.from({ length: nHeads }, (_, i) => make("option", { value: i, textContent: i, selected: String(i) === String(state.head) }))));
    const side = (name, pass, title) => {
      const map = cells(pass.weights, `${title}: ${pass.layer}`, 240);
      return make("section", { className: "side" }, make("h2", { textContent: title }),
        make("div", { className: "chips" }, ...pass.tokens.map((token, i) => {
          const kl = changes.kl[i], chip = make("span", { className: name === "after" && pass.tokens[i] !== before.tokens[i] ? "generated" : "", title: name === "after" && kl !== null ? `KL divergence ${kl.toPrecision(2)} nats` : `position ${i}` }, token);
          if (name === "after") chip.style.setProperty("--w", `${Math.round(60 * Math.min(1, kl ?? 1))}%`);
          return chip;
        })),
        bars(pass.candidates, name === "after" ? before.candidates : null), make("figure", {}, map, make("figcaption", {}, `Weights of ${pass.layer}${pass.head === null ? ", mean over heads" : `, head ${pass.head}`} `, saveButtons(`${name}-weights`, map))));
    };
    const logits = changes.logits, activations = [...changes.outputs.filter(({ path }) => path), ...changes.weights];
    const largest = Math.max(1e-12, ...activations.map(({ mean }) => mean ?? 0));
    out.replaceChildren(make("p", { className: "kind" }, logits.kl_largest === 0 ? "No change." : make("b", { textContent: `The top prediction changes at ${logits.top1_changed} of ${logits.positions} positions; ` }), logits.kl_largest === 0 ? "" : `the largest KL divergence is ${logits.kl_largest.toPrecision(3)} nats.`),
      make("div", { className: "form" }, layer, head), make("div", { className: "sides" }, side("before", before, "Original"), side("after", after, "With interventions")),
      make("div", { className: "answer top-gap" }, make("table", { className: "plain gauges" }, make("caption", { textContent: "Changes: change in output norm; attention moved, as a share of the total (means)" }), make("tbody", {}, ...activations.map(({ path, kind, mean }) =>
        make("tr", {}, make("th", { scope: "row", textContent: `${path} ${kind}` }), gauge((mean ?? largest) / largest), make("td", { textContent: mean === null ? "∞" : mean ? mean.toPrecision(3) : "0" }))))), make("div", {}, make("h3", { textContent: "The same in Python" }), make("pre", { className: "python", tabIndex: 0, textContent: python }),
        make("button", { type: "button", className: "act", textContent: "Copy", on: { async click() { await navigator.clipboard.writeText(python).then(() => status("copied"), () => status("the browser does not allow copying; select the text instead")); } } }))));
    ready(`intervention ${logits.top1_changed} ${logits.kl_largest.toPrecision(3)}`);
  }

  const bars = (candidates, original) => make("table", { className: "plain probabilities" }, make("caption", { textContent: original ? "Next-token probabilities (tick: original)" : "Next-token probabilities" }), make("tbody", {},
    ...candidates.map(({ id, token, probability }) => make("tr", {}, make("th", { scope: "row", textContent: token }), gauge(probability, original?.find((candidate) => candidate.id === id)?.probability ?? null), make("td", { textContent: probability >= 0.001 ? probability.toFixed(3) : "<0.001" })))));

  listing.run((stop) => ask("models", {}, { signal: stop }), (result) => {
    models = result.models.filter((candidate) => candidate.can_generate && candidate.layers.length);
    pick.append(...models.map(({ name }) => make("option", { value: name, textContent: name, selected: name === state.model })));
    if (!models.length) { errorBox.textContent = "this page has no model that generates text; start it with shakespeare, sort-dedup or en-es"; return ready("error"); }
    selectModel(state.model, true);
  }, (error) => status(error.message));
}
