// Model: tokens of a text, next-token probabilities, and three views: walkthrough, attention and beam search.
import { drawingPad } from "./drawing.js";
import { show as showReport } from "./report.js";
import { Latest, ask, choices, download, draw, field, gauge, make, progress, ready, saveButtons, slider, status } from "./tools.js";
import { show as showWalkthrough } from "./walkthrough.js";

// w: generated ids; t, k, p: temperature, top-k, top-p; at: selection within a view; ink: strokes of the drawing.
const DEFAULTS = { model: "", text: "", w: "", t: 1, k: 0, p: 1, seed: 0, view: "walkthrough", at: "", ink: "", width: 3, layer: "" };
const LONG = 512; // tokens from which the attention view shows one layer at a time
const VIEWS = [["walkthrough", "Walkthrough"], ["attention", "Attention"], ["beams", "Beam search"]];

export function open(box, initial, { signal, remember }) {
  const state = { ...DEFAULTS, ...initial };
  for (const name of ["t", "k", "p", "seed", "width"]) state[name] = Number(state[name]);
  const tokenRequests = new Latest(signal), viewRequests = new Latest(signal), listing = new Latest(signal);
  const pick = make("select", { on: { change() { selectModel(pick.value); } } });
  const text = make("textarea", { rows: 2, spellcheck: false, on: { input() { go({ text: text.value, w: "" }); } } });
  const examples = make("div", { className: "examples" }), description = make("p", { className: "note" });
  const tokens = make("div", { className: "chips", ariaLabel: "Tokens" }), bars = make("div"), errorBox = make("p", { className: "caret", role: "alert" });
  const drawing = make("div"), stage = make("div", { className: "stage" });
  const viewButtons = choices("View", VIEWS, state.view, (name) => go({ view: name, at: "" }));
  const button = (label, onClick) => make("button", { type: "button", className: "act", textContent: label, on: { click: onClick } });
  const play = button("▶ Play", () => togglePlay()), back = button("← Back", () => stepBack()), forward = button("Step →", () => step());
  const sliders = make("div", { className: "sliders" },
    slider("Temperature", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5], state.t, (t) => go({ t }, false)),
    slider("Top-k (0: all)", [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40, 50, 100], state.k, (k) => go({ k: Math.round(k) }, false)),
    slider("Top-p", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1], state.p, (p) => go({ p }, false)),
    slider("Seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (seed) => go({ seed: Math.round(seed) }, false)));
  const next = make("section", { className: "next-token" }, make("h2", { textContent: "Next-token probabilities" }), bars, make("div", {}, make("div", { className: "form" }, back, forward, play), sliders));
  const textField = make("div", { className: "field grow" }, field("Text", text), examples);
  box.append(make("div", { className: "form" }, field("Model", pick), textField), description, errorBox, drawing, tokens, next,
    make("div", { className: "bar" }, viewButtons, make("span", { className: "form tight" },
      button("Save as one page", () => save()))), stage);
  let models = [], model = null, last = null, playing = null;

  const generatedIds = () => (state.w ? state.w.split(",").map(Number) : []);
  const isImageModel = () => Boolean(model?.image_size);
  const modelInput = () => (isImageModel() ? { model: model.name, pixels: canvas.bytes() } : { model: model.name, text: state.text, generated_ids: generatedIds() });
  const canvas = drawingPad(() => go({ ink: canvas.strokes() }), state.ink);

  function selectModel(name, keepState = false) {
    model = models.find((candidate) => candidate.name === name) ?? models[0];
    pause();
    examples.replaceChildren(...model.examples.map((example) => button(example.replace(/\n/g, " ⏎ "), () => { text.value = example; go({ text: example, w: "" }); text.focus(); })));
    description.textContent = [model.description, `${model.architecture}, ${model.parameters.toLocaleString("en")} parameters${model.image_size ? "" : `, up to ${model.max_tokens.toLocaleString("en")} tokens`}.`].filter(Boolean).join(". ").replace("..", ".");
    drawing.replaceChildren(...(isImageModel() ? [make("figure", {}, canvas.box)] : []));
    textField.hidden = isImageModel();
    next.hidden = !model.can_generate;
    for (const [name, hide] of [["beams", !model.can_generate], ["walkthrough", !model.layers.length], ["attention", !model.layers.length]]) viewButtons.querySelector(`[data-name="${name}"]`).hidden = hide;
    if (!model.can_generate && state.view === "beams") state.view = "walkthrough";
    viewButtons.set(state.view);
    if (!keepState) Object.assign(state, { text: "", w: "", at: "", layer: "" });
    state.text ||= model.examples[0];
    text.value = state.text;
    go({ model: model.name });
  }

  // Request the tokens immediately, and the view after they have arrived.
  function go(changes, updateView = true) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!model) return;
    if (isImageModel() || !model.can_generate) tokens.replaceChildren();
    if (isImageModel()) return requestView();
    if (updateView) viewRequests.stop();
    tokenRequests.run((stop) => ask("next_token", { ...modelInput(), temperature: state.t, top_k: state.k || null, top_p: state.p < 1 ? state.p : null, seed: state.seed }, { signal: stop }), (result) => {
      last = result;
      errorBox.textContent = "";
      showTokens(result);
      ready(`model ${model.name} ${result.ids.length} ${result.selected?.id ?? ""}`);
      if (updateView) requestView();
    }, (error) => { errorBox.textContent = error.message; pause(); ready("error"); }, state.text.length > 2000 ? 250 : 0);
  }

  function showTokens(result) {
    const chip = (token, i, className) => make("span", { className, title: `position ${i}` }, token, make("small", { textContent: i }));
    tokens.replaceChildren(...(result.source.length ? [make("b", { textContent: "input " }), ...result.source.map((token, i) => chip(token, i, "")), make("b", { className: "turn-line", textContent: "output " })] : []),
      ...result.tokens.map((token, i) => chip(token, i, i < result.n_prompt ? "" : "generated")));
    if (!model.can_generate) return;
    const largest = Math.max(...result.candidates.map(({ probability }) => probability), 1e-9);
    bars.replaceChildren(make("table", { className: "plain probabilities" }, make("caption", { textContent: `${result.n_candidates.toLocaleString("en")} candidate tokens of ${result.vocab_size.toLocaleString("en")}; entropy ${result.entropy.toFixed(2)} nats. Click a token to append it.` }),
      make("tbody", {}, ...result.candidates.map(({ id, token, probability, model_probability: modelProbability }) => make("tr", { className: id === result.selected.id ? "selected" : "" },
        make("th", { scope: "row" }, make("button", { type: "button", textContent: token, title: "Append this token", on: { click() { append(id); } } })),
        gauge(probability / largest, modelProbability / largest), make("td", { textContent: probability >= 0.001 ? probability.toFixed(3) : probability > 0 ? "<0.001" : "0" }))))), make("p", { className: "note", textContent: "Bar: probability with these settings. Tick: the model's own probability." }));
    back.disabled = !state.w;
    forward.disabled = result.ids.length >= model.max_tokens;
    play.textContent = playing ? "❚❚ Pause" : "▶ Play";
  }

  const append = (id) => go({ w: [...generatedIds(), id].join(",") });
  const step = () => last && append(last.selected.id);
  const stepBack = () => { pause(); go({ w: generatedIds().slice(0, -1).join(",") }); };
  const pause = () => { clearTimeout(playing); playing = null; play.textContent = "▶ Play"; };
  signal.addEventListener("abort", pause);

  // Generate until a stop token, the maximum length, or a click on Pause.
  function togglePlay() {
    if (playing) return pause();
    const playStep = () => {
      if (!last || last.ids.length >= model.max_tokens) return pause();
      const { is_end: isEnd } = last;
      append(last.selected.id);
      if (isEnd) return pause();
      const previous = last;
      const wait = () => { playing = setTimeout(() => (last === previous ? wait() : playStep()), last === previous ? 30 : 150); };
      wait();
    };
    playing = setTimeout(playStep, 0);
  }

  async function save() {
    const { html } = await ask("report_page", modelInput(), { signal });
    download(`${model.name}.html`, new Blob([html], { type: "text/html" }));
  }

  // ---------------------------------------------------------------------- views

  let viewController = null;
  function requestView() {
    const wait = last && last.ids.length > 96 ? 350 : 60, isLong = last?.ids.length > LONG;
    if (isLong) state.layer ||= model.layers.at(-1).path;
    if (state.view === "attention") viewRequests.run((stop) => ask("attention", { ...modelInput(), layer: isLong && !last.source.length ? state.layer : "" }, { signal: stop, onProgress: progress }), showAttention, showError, wait);
    else if (state.view === "walkthrough") viewRequests.run((stop) => ask("walkthrough", modelInput(), { signal: stop }), showSteps, showError, wait);
    else viewRequests.run((stop) => ask("beam_search", { ...modelInput(), width: state.width }, { signal: stop, onProgress: progress }), showBeams, showError, wait);
  }

  const showError = (error) => { status(""); newViewSignal(); stage.replaceChildren(make("p", { className: "note", role: "alert", textContent: error.message })); ready(`error ${state.view}`); };
  const newViewSignal = () => { viewController?.abort(); viewController = new AbortController(); signal.addEventListener("abort", () => viewController.abort(), { signal: viewController.signal }); return viewController.signal; };
  // The views write their selection to the address; here it becomes the field `at` of the state.
  const viewHistory = { replaceState: (_, __, hash) => { state.at = hash.slice(1); remember(state, DEFAULTS); } };
  const part = (tag, id) => make(tag, { id });
  const help = () => make("dialog", { id: "help" }, make("h2", { textContent: "Keyboard" }), make("p", { textContent: "Arrow keys move between heads and layers, or steps and blocks; [ and ] between tokens or heads; 1 2 3 change the view; in a matrix + − 0 zoom." }),
    make("form", { method: "dialog" }, make("button", { textContent: "Close" })));
  const helpButton = () => make("button", { id: "help-open", type: "button", title: "Keyboard (?)", ariaLabel: "Keyboard help", textContent: "?" });

  // Show the attention report in the elements that its script expects.
  function showAttention(result) {
    status("");
    const viewSignal = newViewSignal(), save = saveButtons("attention", () => document.querySelector("#view canvas, #view svg"));
    stage.className = "stage";
    stage.replaceChildren(make("header", { className: "inner" }, make("div", {}, part("h1", "title"), part("dl", "facts")), make("div", {}, save, helpButton())),
      make("div", { className: "look-main" }, make("nav", { id: "heads", ariaLabel: "Layers and heads" }),
        make("section", { id: "stage" }, make("div", { className: "bar" }, make("h2", { id: "where", ariaLive: "polite" }), make("div", { className: "choices", id: "views", role: "group", ariaLabel: "View" })), part("p", "what"), make("div", { id: "view", tabIndex: -1 }), part("p", "legend")),
        make("aside", { id: "detail", ariaLabel: "Details of the chosen token" })), part("section", "more"), part("footer", "foot"), help());
    result.footer = result.footer.replace(/ This page is self-contained.*/, "");
    if (result.maps.length < model.layers.length) stage.prepend(field("Layer (a long text shows one at a time)", make("select", { on: { change(event) { go({ layer: event.target.value, at: "" }); } } },
      ...model.layers.map(({ path }) => make("option", { value: path, textContent: path, selected: path === state.layer })))));
    showReport(result, viewSignal, viewHistory, { hash: `#${state.at}` });
    document.documentElement.dataset.shown = `attention ${result.texts[0].length}`;
  }

  function showSteps(result) {
    const viewSignal = newViewSignal();
    stage.className = "stage walk";
    stage.replaceChildren(make("header", { className: "inner" }, make("div", {}, part("h1", "title"), part("dl", "facts"), make("dl", { id: "sizes", ariaLabel: "Sizes" })), make("div", {}, saveButtons("model", () => document.querySelector("#drawing svg")), helpButton())),
      make("div", { className: "walk-main" }, make("nav", { id: "drawing", ariaLabel: "The model's architecture: every box leads to its steps" }), make("section", { id: "step", tabIndex: -1, ariaLive: "polite" })),
      make("section", { id: "paper", ariaHidden: "true" }), help());
    showWalkthrough(result, viewSignal, viewHistory, { hash: `#${state.at}` });
    document.documentElement.dataset.shown = `walkthrough ${result.steps.length}`;
  }

  function showBeams(result) {
    status("");
    newViewSignal();
    stage.className = "stage";
    const svg = beamTree(result), width = slider("Width", [1, 2, 3, 4, 5, 6, 7, 8], state.width, (value) => go({ width: Math.max(1, Math.min(8, Math.round(value))) }));
    stage.replaceChildren(make("div", { className: "form" }, width), make("figure", { className: "scroll" }, svg), make("p", { className: "note" }, "All prefixes that the search kept. Wider lines are more probable; the best hypothesis is highlighted. ", saveButtons("beams", svg)),
      make("ol", { className: "hypotheses" }, ...result.hypotheses.map(({ text, score, is_finished: isFinished }) => make("li", {}, make("b", { textContent: text || "(empty)" }), make("span", { className: "note", textContent: ` score ${score.toFixed(3)}${isFinished ? "" : ", unfinished"}` })))));
    document.documentElement.dataset.shown = `beams ${result.nodes.length}`;
  }

  listing.run((stop) => ask("models", {}, { signal: stop }), (result) => {
    models = result.models.filter((candidate) => candidate.layers.length || candidate.can_generate).sort((a, b) => b.can_generate - a.can_generate);
    pick.append(...models.map(({ name }) => make("option", { value: name, textContent: name, selected: name === state.model })));
    selectModel(state.model, true);
  }, (error) => status(error.message));
}

// Draw a tree from left to right: one column per token, one row per leaf.
function beamTree({ nodes, hypotheses }) {
  const children = nodes.map(() => []), roots = [], best = new Set(hypotheses[0]?.nodes ?? []);
  nodes.forEach(({ parent }, i) => (parent === null ? roots : children[parent]).push(i));
  const points = [], [W, H] = [92, 24];
  let nLeaves = 0, maxDepth = 0;
  const layOut = (i, depth) => {
    maxDepth = Math.max(maxDepth, depth);
    const ys = children[i].sort((a, b) => nodes[b].log_prob - nodes[a].log_prob).map((child) => layOut(child, depth + 1));
    const y = ys.length ? (ys[0] + ys.at(-1)) / 2 : nLeaves++ * H + 14;
    points[i] = [depth * W + 46, y];
    return y;
  };
  const rootYs = roots.sort((a, b) => nodes[b].log_prob - nodes[a].log_prob).map((root) => layOut(root, 0)), middle = rootYs.length ? (rootYs[0] + rootYs.at(-1)) / 2 : 14;
  const width = (maxDepth + 1) * W + 60, height = Math.max(30, nLeaves * H + 8);
  const svg = draw("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(draw("title", {}, `Beam search: ${hypotheses.map(({ text }) => text).join("; ")}`));
  nodes.forEach(({ parent, log_prob: logProb }, i) => {
    const [x, y] = points[i], [a, b] = parent === null ? [6, middle] : [points[parent][0] + 40, points[parent][1]];
    svg.append(draw("path", { class: best.has(i) ? "best" : "", d: `M${a} ${b}C${(a + x) / 2 - 10} ${b} ${(a + x) / 2 - 20} ${y} ${x - 6} ${y}`, "stroke-width": (0.6 + 3.4 * Math.exp(logProb)).toFixed(2) }));
  });
  nodes.forEach(({ token, log_prob: logProb }, i) => {
    const [x, y] = points[i], label = token.trim() || token;
    svg.append(draw("text", { class: best.has(i) ? "best" : "", x: x - 2, y: y + 4 }, label.length > 7 ? `${label.slice(0, 6)}…` : label, draw("title", {}, `${token}: ${Math.exp(logProb).toFixed(3)}`)));
  });
  return svg;
}
