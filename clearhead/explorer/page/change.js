// Change it: the same text twice, as the model is and with something changed; what moved, and the Python for it.
import { Latest, ask, cells, choices, field, gauge, make, ready, saving, slider, status } from "./tools.js";

const DEFAULTS = { model: "", text: "", edits: "", other: "", mask: "", t: 1, at: "", token: "", path: "", head: "" };

// An edit in the address: path, heads and how, as in blocks.2.attention:0+3:off or blocks.1::scale:0.5
const parse = (words) => words.split(";").filter(Boolean).map((one) => {
  const [path, heads = "", how = "off", by = "0", positions = ""] = one.split(":");
  const numbers = (list) => list.split("+").filter((n) => n !== "").map(Number);
  return { path, heads: numbers(heads), how, by: Number(by), positions: numbers(positions) };
});
const written = (edits) => edits.map(({ path, heads, how, by, positions }) => [path, heads.join("+"), how, by, positions.join("+")].join(":").replace(/:+$/, "")).join(";");

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given, t: Number(given.t) || 1 }, latest = new Latest(signal), first = new Latest(signal);
  const pick = make("select", { on: { change() { begin(pick.value); } } });
  const line = (words, name, more = {}) => field(words, make("input", { type: "text", value: state[name], on: { input(event) { go({ [name]: event.target.value }); } }, ...more }));
  const text = make("textarea", { rows: 2, value: state.text, on: { input() { go({ text: text.value }); } } });
  const grid = make("div", { className: "switches" }), list = make("div", { className: "edits" }), wrong = make("p", { className: "caret", role: "alert" }), out = make("div");
  const mask = line("Mask instead (self-attention)", "mask", { className: "code", placeholder: "causal() & window(8, 0)" });
  const other = line("Second text, for patches", "other"), at = line("Force position", "at", { className: "typed", inputMode: "numeric" }), token = line("to be this token", "token", { className: "typed" });
  const warm = slider("Attention's temperature", [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 100], state.t, (t) => go({ t }));
  const how = choices("What a click does", [["off", "Switch off"], ["scale", "Scale"], ["patch", "Patch"]], "off", (name) => { click.how = name; by.hidden = name !== "scale"; });
  const by = slider("by", [-2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1.25, 1.5, 2, 3, 5], 0.5, (value) => { click.by = value; });
  by.hidden = true;
  const click = { how: "off", by: 0.5 };
  box.append(make("h1", { textContent: "Change it" }),
    make("p", { className: "lead", textContent: "Switch heads or blocks off, scale them, patch them from another text; another mask, another temperature, another token. Both runs stand side by side." }),
    make("div", { className: "form" }, field("Model", pick), make("div", { className: "field grow" }, field("Text", text))),
    make("div", { className: "form" }, how, by, make("button", { type: "button", className: "act", textContent: "Undo all", on: { click() { reset(); } } })),
    grid, list, make("div", { className: "form" }, warm, mask, other, at, token), wrong, out);
  let models = [], model = null;

  function begin(name, keep = false) {
    model = models.find((one) => one.name === name) ?? models[0];
    if (!keep) Object.assign(state, DEFAULTS);
    state.text ||= model.examples[0];
    text.value = state.text;
    go({ model: model.name });
  }

  function reset() {
    Object.assign(state, { edits: "", mask: "", t: 1, at: "", token: "", other: "" });
    for (const boxed of [mask, other, at, token]) boxed.querySelector("input").value = "";
    warm.set(1);
    go({});
  }

  // A click on a head or a block puts it among the edits, or takes it out.
  function turn(path, head) {
    const edits = parse(state.edits), same = (one) => one.path === path && (head === null ? !one.heads.length : one.heads.length > 0);
    const old = edits.find(same), rest = edits.filter((one) => !same(one));
    if (head === null) return go({ edits: written(old ? rest : [...rest, { path, heads: [], how: click.how, by: click.by, positions: [] }]) });
    const heads = old?.heads.includes(head) ? old.heads.filter((one) => one !== head) : [...(old?.heads ?? []), head].sort((a, b) => a - b);
    go({ edits: written(heads.length ? [...rest, { path, heads, how: click.how, by: click.by, positions: old?.positions ?? [] }] : rest) });
  }

  function switches() {
    const edits = parse(state.edits), focus = grid.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const button = (words, path, head, label) => {
      const edit = edits.find((one) => one.path === path && (head === null ? !one.heads.length : one.heads.includes(head)));
      const made = make("button", { type: "button", textContent: words, title: label, ariaLabel: `${label}${edit ? `: ${edit.how}` : ""}`, className: edit?.how ?? "", on: { click() { turn(path, head); } } });
      made.setAttribute("aria-pressed", String(Boolean(edit)));
      made.dataset.key = `${path}/${head}`;
      return made;
    };
    grid.replaceChildren(...model.layers.map(({ path, heads }) => make("div", { className: "layer" }, make("span", { className: "note code", textContent: path }),
      ...Array.from({ length: heads }, (_, head) => button(head, path, head, `${path}, head ${head}`)),
      button("all", path, null, `${path}, the whole layer`),
      ...(path.endsWith("cross_attention") ? [] : [button("feed-forward", path.replace(/[^.]+$/, "feed_forward"), null, `the feed-forward beside ${path}`), button("block", path.replace(/\.[^.]+$/, ""), null, `${path.replace(/\.[^.]+$/, "")}, the whole block`)]))));
    if (focus) grid.querySelector(`[data-key="${focus}"]`)?.focus();
  }

  function go(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!model) return;
    switches();
    const body = { model: model.name, text: state.text, edits: parse(state.edits), other: state.other, mask: state.mask, temperature: state.t,
      forced: state.at === "" ? null : Number(state.at), token: state.token, path: state.path, head: state.head === "" ? null : Number(state.head) };
    latest.run((stop) => ask("change", body, { signal: stop }), show, (error) => { wrong.textContent = error.message; out.classList.add("old"); ready("refused"); });
  }

  function show({ before, after, moved, python }) {
    wrong.textContent = "";
    out.classList.remove("old");
    const layers = model.layers.map(({ path }) => path), heads = model.layers.find(({ path }) => path === before.path)?.heads ?? 0;
    const which = field("Layer", make("select", { on: { change(event) { go({ path: event.target.value, head: "" }); } } }, ...layers.map((path) => make("option", { value: path, textContent: path, selected: path === before.path }))));
    const head = field("Head", make("select", { on: { change(event) { go({ head: event.target.value }); } } }, make("option", { value: "", textContent: "mean" }), ...Array.from({ length: heads }, (_, i) => make("option", { value: i, textContent: i, selected: String(i) === String(state.head) }))));
    const side = (name, run, words) => {
      const map = cells(run.weights, `${words}: ${run.path}`, 240);
      return make("section", { className: "side" }, make("h2", { textContent: words }),
        make("div", { className: "chips" }, ...run.tokens.map((token, i) => {
          const kl = moved.kl[i], chip = make("span", { className: name === "after" && run.tokens[i] !== before.tokens[i] ? "own" : "", title: name === "after" && kl !== null ? `moved by ${kl.toPrecision(2)} nats` : `position ${i}` }, token);
          if (name === "after") chip.style.setProperty("--w", `${Math.round(60 * Math.min(1, kl ?? 1))}%`);
          return chip;
        })),
        bars(run.next, name === "after" ? before.next : null), make("figure", {}, map, make("figcaption", {}, `Weights of ${run.path}${run.head === null ? ", mean of heads" : `, head ${run.head}`} `, saving(`${name}-weights`, map))));
    };
    const logits = moved.logits, shown = [...moved.outputs.filter(({ path }) => path), ...moved.weights];
    const most = Math.max(1e-12, ...shown.map(({ mean }) => mean ?? 0));
    out.replaceChildren(make("p", { className: "kind" }, logits.kl_largest === 0 ? "Nothing moved." : make("b", { textContent: `The first choice changes at ${logits.top1_changed} of ${logits.positions} positions; ` }), logits.kl_largest === 0 ? "" : `the largest move is ${logits.kl_largest.toPrecision(3)} nats.`),
      make("div", { className: "form" }, which, head), make("div", { className: "sides" }, side("before", before, "As it is"), side("after", after, "Changed")),
      make("div", { className: "answer top-gap" }, make("table", { className: "plain gauges" }, make("caption", { textContent: "What moved: outputs by their length, weights of the chosen layer by the share that went elsewhere (means)" }), make("tbody", {}, ...shown.map(({ path, kind, mean }) =>
        make("tr", {}, make("th", { scope: "row", textContent: `${path} ${kind}` }), gauge((mean ?? most) / most), make("td", { textContent: mean === null ? "∞" : mean ? mean.toPrecision(3) : "0" }))))), make("div", {}, make("h3", { textContent: "The same in Python" }), make("pre", { className: "python", tabIndex: 0, textContent: python }),
        make("button", { type: "button", className: "act", textContent: "Copy", on: { async click() { await navigator.clipboard.writeText(python).then(() => status("copied"), () => status("the browser would not copy: mark the text")); } } }))));
    ready(`change ${logits.top1_changed} ${logits.kl_largest.toPrecision(3)}`);
  }

  const bars = (next, old) => make("table", { className: "plain chances" }, make("caption", { textContent: old ? "What comes next; the mark is as it was" : "What comes next" }), make("tbody", {},
    ...next.map((one) => make("tr", {}, make("th", { scope: "row", textContent: one.token }), gauge(one.p, old?.find(({ id }) => id === one.id)?.p ?? null), make("td", { textContent: one.p >= 0.001 ? one.p.toFixed(3) : "<0.001" })))));

  first.run((stop) => ask("models", {}, { signal: stop }), (found) => {
    models = found.models.filter((one) => one.writes && one.layers.length);
    pick.append(...models.map(({ name }) => make("option", { value: name, textContent: name, selected: name === state.model })));
    if (!models.length) { wrong.textContent = "no model on this page writes: start it with shakespeare, sort-dedup or en-es"; return ready("refused"); }
    begin(state.model, true);
  }, (error) => status(error.message));
}
