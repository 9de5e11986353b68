// Run: type a text; its tokens, what comes next, the model with every station, who attends to whom, and beams.
import { Latest, ask, choices, download, draw, field, gauge, make, progress, ready, saving, slider, status } from "./tools.js";
import { pad } from "./pad.js";
import { show as showLook } from "./look.js";
import { show as showWalk } from "./walk.js";

const DEFAULTS = { model: "", text: "", w: "", t: 1, k: 0, p: 1, seed: 0, view: "stations", at: "", ink: "", width: 3, layer: "" };
const LONG = 512; // tokens from which one layer is looked at, not all
const VIEWS = [["stations", "Stations"], ["attention", "Attention"], ["beams", "Beams"]];

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given };
  for (const name of ["t", "k", "p", "seed", "width"]) state[name] = Number(state[name]);
  const quick = new Latest(signal), slow = new Latest(signal), first = new Latest(signal);
  const pick = make("select", { on: { change() { begin(pick.value); } } });
  const text = make("textarea", { rows: 2, spellcheck: false, on: { input() { go({ text: text.value, w: "" }); } } });
  const examples = make("div", { className: "examples" }), about = make("p", { className: "note" });
  const tokens = make("div", { className: "chips", ariaLabel: "Tokens" }), bars = make("div"), wrong = make("p", { className: "caret", role: "alert" });
  const drawing = make("div"), stage = make("div", { className: "stage" });
  const view = choices("View", VIEWS, state.view, (name) => go({ view: name, at: "" }));
  const act = (words, run, more = {}) => make("button", { type: "button", className: "act", textContent: words, on: { click: run }, ...more });
  const play = act("▶ Play", () => toggling()), back = act("← Back", () => stepBack()), forth = act("Step →", () => step());
  const knobs = make("div", { className: "sliders" },
    slider("Temperature", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5], state.t, (t) => go({ t }, false)),
    slider("Top-k (0: all)", [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40, 50, 100], state.k, (k) => go({ k: Math.round(k) }, false)),
    slider("Top-p", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1], state.p, (p) => go({ p }, false)),
    slider("Seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (seed) => go({ seed: Math.round(seed) }, false)));
  const next = make("section", { className: "coming" }, make("h2", { textContent: "What comes next" }), bars, make("div", {}, make("div", { className: "form" }, back, forth, play), knobs));
  const typed = make("div", { className: "field grow" }, field("Text", text), examples);
  box.append(make("div", { className: "form" }, field("Model", pick), typed), about, wrong, drawing, tokens, next,
    make("div", { className: "bar" }, view, make("span", { className: "form tight" },
      act("Save this run as one page", () => save()))), stage);
  let models = [], model = null, last = null, playing = null;

  const written = () => (state.w ? state.w.split(",").map(Number) : []);
  const isPicture = () => Boolean(model?.size);
  const asked = () => (isPicture() ? { model: model.name, pixels: canvas.bytes() } : { model: model.name, text: state.text, written: written() });
  const canvas = pad(() => go({ ink: canvas.strokes() }), state.ink);

  function begin(name, keep = false) {
    model = models.find((one) => one.name === name) ?? models[0];
    stop();
    examples.replaceChildren(...model.examples.map((words) => act(words.replace(/\n/g, " ⏎ "), () => { text.value = words; go({ text: words, w: "" }); text.focus(); })));
    about.textContent = [model.about, `${model.kind}, ${model.weights.toLocaleString("en")} weights${model.size ? "" : `, up to ${model.longest.toLocaleString("en")} tokens`}.`].filter(Boolean).join(". ").replace("..", ".");
    drawing.replaceChildren(...(isPicture() ? [make("figure", {}, canvas.box)] : []));
    typed.hidden = isPicture();
    next.hidden = !model.writes;
    for (const [name, hide] of [["beams", !model.writes], ["stations", !model.layers.length], ["attention", !model.layers.length]]) view.querySelector(`[data-name="${name}"]`).hidden = hide;
    if (!model.writes && state.view === "beams") state.view = "stations";
    view.set(state.view);
    if (!keep) Object.assign(state, { text: "", w: "", at: "", layer: "" });
    state.text ||= model.examples[0];
    text.value = state.text;
    go({ model: model.name });
  }

  // A change of the text asks for the tokens at once, and for the rest as soon as these are there.
  function go(changes, rest = true) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!model) return;
    if (isPicture() || !model.writes) tokens.replaceChildren();
    if (isPicture()) return look();
    if (rest) slow.stop();
    quick.run((cut) => ask("step", { ...asked(), temperature: state.t, top_k: state.k || null, top_p: state.p < 1 ? state.p : null, seed: state.seed }, { signal: cut }), (found) => {
      last = found;
      wrong.textContent = "";
      show(found);
      ready(`run ${model.name} ${found.ids.length} ${found.taken?.id ?? ""}`);
      if (rest) look();
    }, (error) => { wrong.textContent = error.message; stop(); ready("refused"); }, state.text.length > 2000 ? 250 : 0);
  }

  function show(found) {
    const chip = (token, i, kind) => make("span", { className: kind, title: `position ${i}` }, token, make("small", { textContent: i }));
    tokens.replaceChildren(...(found.source.length ? [make("b", { textContent: "reads " }), ...found.source.map((token, i) => chip(token, i, "")), make("b", { className: "turn-line", textContent: "writes " })] : []),
      ...found.tokens.map((token, i) => chip(token, i, i < found.given ? "" : "own")));
    if (!model.writes) return;
    const most = Math.max(...found.next.map(({ p }) => p), 1e-9);
    bars.replaceChildren(make("table", { className: "plain chances" }, make("caption", { textContent: `${found.kept.toLocaleString("en")} of ${found.of.toLocaleString("en")} tokens can come; entropy ${found.entropy.toFixed(2)} nats. Choose one to write it.` }),
      make("tbody", {}, ...found.next.map((one) => make("tr", { className: one.id === found.taken.id ? "taken" : "" },
        make("th", { scope: "row" }, make("button", { type: "button", textContent: one.token, title: "Write this token", on: { click() { write(one.id); } } })),
        gauge(one.p / most, one.raw / most), make("td", { textContent: one.p >= 0.001 ? one.p.toFixed(3) : one.p > 0 ? "<0.001" : "0" }))))), make("p", { className: "note", textContent: "The bar is the chance with these settings; the mark is the model's own." }));
    back.disabled = !state.w;
    forth.disabled = found.ids.length >= model.longest;
    play.textContent = playing ? "❚❚ Pause" : "▶ Play";
  }

  const write = (id) => go({ w: [...written(), id].join(",") });
  const step = () => last && write(last.taken.id);
  const stepBack = () => { stop(); go({ w: written().slice(0, -1).join(",") }); };
  const stop = () => { clearTimeout(playing); playing = null; play.textContent = "▶ Play"; };
  signal.addEventListener("abort", stop);

  // Plays until the text ends, there is no room, or somebody pauses.
  function toggling() {
    if (playing) return stop();
    const on = () => {
      if (!last || last.ids.length >= model.longest) return stop();
      const { ends } = last;
      write(last.taken.id);
      if (ends) return stop();
      const seen = last;
      const wait = () => { playing = setTimeout(() => (last === seen ? wait() : on()), last === seen ? 30 : 150); };
      wait();
    };
    playing = setTimeout(on, 0);
  }

  async function save() {
    const { html } = await ask("page", asked(), { signal });
    download(`${model.name}.html`, new Blob([html], { type: "text/html" }));
  }

  // ---------------------------------------------------------------------- the three views

  let shown = null;
  function look() {
    const wait = last && last.ids.length > 96 ? 350 : 60, isLong = last?.ids.length > LONG;
    if (isLong) state.layer ||= model.layers.at(-1).path;
    if (state.view === "attention") slow.run((cut) => ask("attention", { ...asked(), layer: isLong && !last.source.length ? state.layer : "" }, { signal: cut, onProgress: progress }), attention, told, wait);
    else if (state.view === "stations") slow.run((cut) => ask("walk", asked(), { signal: cut }), stations, told, wait);
    else slow.run((cut) => ask("beams", { ...asked(), width: state.width }, { signal: cut, onProgress: progress }), beams, told, wait);
  }

  const told = (error) => { status(""); fresh(); stage.replaceChildren(make("p", { className: "note", role: "alert", textContent: error.message })); ready(`told ${state.view}`); };
  const fresh = () => { shown?.abort(); shown = new AbortController(); signal.addEventListener("abort", () => shown.abort(), { signal: shown.signal }); return shown.signal; };
  const kept = { replaceState: (_, __, hash) => { state.at = hash.slice(1); remember(state, DEFAULTS); } };
  const part = (tag, id, ...more) => make(tag, { id }, ...more);
  const help = () => make("dialog", { id: "help" }, make("h2", { textContent: "Keyboard" }), make("p", { textContent: "Arrow keys move between heads and layers, or stations and blocks; [ and ] between tokens or heads; 1 2 3 change the view; in a matrix + − 0 zoom." }),
    make("form", { method: "dialog" }, make("button", { textContent: "Close" })));
  const helper = () => make("button", { id: "help-open", type: "button", title: "Keyboard (?)", ariaLabel: "Keyboard help", textContent: "?" });

  // The panel of `look`, in the elements that it expects; what it keeps in its address stands in ours.
  function attention(found) {
    status("");
    const end = fresh(), save = saving("attention", () => document.querySelector("#view canvas, #view svg"));
    stage.className = "stage";
    stage.replaceChildren(make("header", { className: "inner" }, make("div", {}, part("h1", "title"), part("dl", "facts")), make("div", {}, save, helper())),
      make("div", { className: "look-main" }, make("nav", { id: "heads", ariaLabel: "Layers and heads" }),
        make("section", { id: "stage" }, make("div", { className: "bar" }, make("h2", { id: "where", ariaLive: "polite" }), make("div", { className: "choices", id: "views", role: "group", ariaLabel: "View" })), part("p", "what"), make("div", { id: "view", tabIndex: -1 }), part("p", "legend")),
        make("aside", { id: "detail", ariaLabel: "Details of the chosen token" })), part("section", "more"), part("footer", "foot"), help());
    found.footer = found.footer.replace(/ This page is self-contained.*/, "");
    if (found.maps.length < model.layers.length) stage.prepend(field("Layer (of a long text one at a time)", make("select", { on: { change(event) { go({ layer: event.target.value, at: "" }); } } },
      ...model.layers.map(({ path }) => make("option", { value: path, textContent: path, selected: path === state.layer })))));
    showLook(found, end, kept, { hash: `#${state.at}` });
    document.documentElement.dataset.shown = `attention ${found.texts[0].length}`;
  }

  function stations(found) {
    const end = fresh();
    stage.className = "stage walk";
    stage.replaceChildren(make("header", { className: "inner" }, make("div", {}, part("h1", "title"), part("dl", "facts"), make("dl", { id: "sizes", ariaLabel: "Sizes" })), make("div", {}, saving("model", () => document.querySelector("#drawing svg")), helper())),
      make("div", { className: "walk-main" }, make("nav", { id: "drawing", ariaLabel: "The model's architecture: every box leads to its steps" }), make("section", { id: "step", tabIndex: -1, ariaLive: "polite" })),
      make("section", { id: "paper", ariaHidden: "true" }), help());
    showWalk(found, end, kept, { hash: `#${state.at}` });
    document.documentElement.dataset.shown = `stations ${found.steps.length}`;
  }

  function beams(found) {
    status("");
    fresh();
    stage.className = "stage";
    const svg = tree(found), width = slider("Width", [1, 2, 3, 4, 5, 6, 7, 8], state.width, (value) => go({ width: Math.max(1, Math.min(8, Math.round(value))) }));
    stage.replaceChildren(make("div", { className: "form" }, width), make("figure", { className: "scroll" }, svg), make("p", { className: "note" }, "Every beginning that was alive; wider lines are likelier, the best is marked. ", saving("beams", svg)),
      make("ol", { className: "found" }, ...found.found.map(({ text, score, ended }) => make("li", {}, make("b", { textContent: text || "(nothing)" }), make("span", { className: "note", textContent: ` score ${score.toFixed(3)}${ended ? "" : ", not ended"}` })))));
    document.documentElement.dataset.shown = `beams ${found.nodes.length}`;
  }

  first.run((cut) => ask("models", {}, { signal: cut }), (found) => {
    models = found.models.filter((one) => one.layers.length || one.writes).sort((a, b) => b.writes - a.writes);
    pick.append(...models.map(({ name }) => make("option", { value: name, textContent: name, selected: name === state.model })));
    begin(state.model, true);
  }, (error) => status(error.message));
}

// A tree from left to right: a column a token, a row a leaf.
function tree({ nodes, found }) {
  const below = nodes.map(() => []), roots = [], best = new Set(found[0]?.path ?? []);
  nodes.forEach(({ above }, i) => (above === null ? roots : below[above]).push(i));
  const place = [], [W, H] = [92, 24];
  let leaves = 0, deep = 0;
  const lay = (i, depth) => {
    deep = Math.max(deep, depth);
    const ys = below[i].sort((a, b) => nodes[b].log_p - nodes[a].log_p).map((child) => lay(child, depth + 1));
    const y = ys.length ? (ys[0] + ys.at(-1)) / 2 : leaves++ * H + 14;
    place[i] = [depth * W + 46, y];
    return y;
  };
  const tops = roots.sort((a, b) => nodes[b].log_p - nodes[a].log_p).map((root) => lay(root, 0)), middle = tops.length ? (tops[0] + tops.at(-1)) / 2 : 14;
  const width = (deep + 1) * W + 60, height = Math.max(30, leaves * H + 8);
  const svg = draw("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(draw("title", {}, `Beam search: ${found.map(({ text }) => text).join("; ")}`));
  nodes.forEach(({ above, log_p: chance }, i) => {
    const [x, y] = place[i], [a, b] = above === null ? [6, middle] : [place[above][0] + 40, place[above][1]];
    svg.append(draw("path", { class: best.has(i) ? "best" : "", d: `M${a} ${b}C${(a + x) / 2 - 10} ${b} ${(a + x) / 2 - 20} ${y} ${x - 6} ${y}`, "stroke-width": (0.6 + 3.4 * Math.exp(chance)).toFixed(2) }));
  });
  nodes.forEach(({ token, log_p: chance }, i) => {
    const [x, y] = place[i], words = token.trim() || token;
    svg.append(draw("text", { class: best.has(i) ? "best" : "", x: x - 2, y: y + 4 }, words.length > 7 ? `${words.slice(0, 6)}…` : words, draw("title", {}, `${token}: ${Math.exp(chance).toFixed(3)}`)));
  });
  return svg;
}
