// Run: what a model makes of an input. The answer is on top; below it are attention, the drawing, beam search or attribution.
import { beams } from "./beams.js";
import { digitView } from "./digit.js";
import { answerLine } from "./output.js";
import { attentionView, layerSelect, stepsView } from "./report_view.js";
import { standalonePage } from "./save.js";
import { soundLine } from "./sound.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, button, choices, download, make, pane, progress, readState, ready, status } from "./tools.js";

// view: the view; at: the selection within it; width: of the beam search; layer: of a long text.
const DEFAULTS = { ...SUBJECT, view: "attention", at: "", width: 3, layer: "" };
const LONG = 512; // tokens from which the attention view shows one layer at a time
const VIEWS = [["attention", "Attention"], ["steps", "Step by step"], ["beams", "Beam search"], ["pixels", "Attribution"]];

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: SAMPLING, views: VIEWS });
  const requests = new Latest(signal), stage = pane("stage"), save = () => remember(state, DEFAULTS);
  const answer = answerLine((step) => { subject.select(step); answer.show(subject.last, step); selectRow(step); linkTour(); });
  const views = choices("View", VIEWS, state.view, (view) => { Object.assign(state, { view, at: "" }); save(); showView(); });
  const switchOff = make("a", { className: "act", href: "#intervention", hidden: true, title: "Open Interventions with this part set to zero", on: { pointerenter: linkHead, focus: linkHead, click: linkHead } }, "");
  const why = make("a", { className: "act", href: "#tour", hidden: true, title: "Which parts of the model write this token? Open the tour of this run" });
  views.hidden = true; // until the model is known
  const subject = new Subject({ state, signal, save, onModel: showViews, onRun, onFail: (error) => (error.isEmpty ? stage.empty(error.message) : stage.fail(error.message)), onLoading: () => { requests.stop(); stage.loading(); } });
  modelLayout(box, subject, answer, make("div", { className: "bar stage-bar" }, views, make("div", { className: "form tight" }, why, switchOff, button("Save as one page", savePage, { title: "Save what is shown here as one HTML file" }))), stage);
  let viewEnd = new AbortController(), view = null;

  function showViews() {
    const { model } = subject, has = { attention: model.layers.length, steps: model.layers.length && model.input !== "audio", beams: model.can_generate, pixels: model.input === "image" };
    for (const [name] of VIEWS) views.querySelector(`[data-name="${name}"]`).hidden = !has[name];
    views.hidden = Object.values(has).filter(Boolean).length < 2;
    if (!has[state.view]) state.view = VIEWS.map(([name]) => name).find((name) => has[name]) ?? "attention";
    views.set(state.view);
    state.layer = model.layers.some(({ path }) => path === state.layer) ? state.layer : "";
  }

  function onRun(result) {
    if (subject.model.input === "text") answer.show(result, result.next && subject.step === null ? null : subject.shownStep);
    linkTour();
    if (subject.model.input === "audio") soundLine(answer, result, subject.sound.player);
    if (subject.model.input === "image") ready(`model ${subject.model.name}`);
    showView();
  }

  // Select the row that writes an output token in the attention view.
  function selectRow(step) {
    if (state.view !== "attention" || !view || subject.model.input !== "text" || !subject.model.can_generate) return;
    const rows = view.rowsOf(), row = rows.kind === "cross" ? step : rows.stack.includes("encoder") ? null : subject.last.n_prompt - 1 + step;
    if (row !== null && row < rows.length) view.go({ row });
  }

  // Let the link ask about the selected output token.
  function linkTour() {
    const step = subject.model.can_generate ? subject.shownStep : null, token = step === null ? undefined : subject.last.tokens[subject.last.n_prompt + step];
    why.hidden = token === undefined;
    if (!why.hidden) Object.assign(why, { textContent: `Why “${token.trim() || token}”? →`, href: `#tour?${new URLSearchParams({ ...sharedState(), step: String(step) })}` });
  }

  const sharedState = () => Object.fromEntries(Object.entries(state).filter(([key, value]) => key in SUBJECT && String(value) !== String(SUBJECT[key])));

  // Let the link open Interventions with the selected head, or all heads of the layer, set to zero.
  function linkHead() {
    if (!view) return;
    const { path, head } = view.rowsOf();
    switchOff.textContent = head === null ? "Switch these heads off →" : "Switch this head off →";
    switchOff.href = `#intervention?${new URLSearchParams({ ...sharedState(), edits: `${path}:${head ?? ""}:zero`, step: String(subject.shownStep), layer: path, ...(head === null ? {} : { head: String(head) }) })}`;
  }

  // Show the view of the last run; typing waits until the text rests.
  function showView() {
    if (!subject.last) return;
    view = null;
    switchOff.hidden = true;
    const { model } = subject, length = subject.last.ids?.length ?? 0, isLong = length > LONG, wait = length > 96 ? 350 : 60;
    const ask_ = (action, more = {}) => (stop) => ask(action, { ...subject.input, ...more }, { signal: stop, onProgress: progress });
    const run = (send, show) => { stage.loading(); requests.run(send, async (result) => { const ended = newSignal(); status(""); await show(result, ended); if (!ended.aborted) document.documentElement.dataset.shown = `${state.view} ${(result.maps ?? result.steps ?? result.nodes ?? result.models).length}`; }, fail, wait); };
    if (!model.layers.length && state.view !== "pixels") return stage.empty("This model has no attention layers.");
    if (isLong) state.layer ||= model.layers.at(-1).path;
    if (state.view === "attention") run(ask_("attention", { layer: isLong && !subject.last.source.length ? state.layer : "" }), async (result, ended) => {
      const choice = result.maps.length < model.layers.length ? layerSelect(model.layers, state.layer, (layer) => { Object.assign(state, { layer, at: "" }); save(); showView(); }) : null;
      view = attentionView(stage, result, place(), ended, choice);
      switchOff.hidden = !model.can_generate;
      linkHead();
      if (subject.step !== null || !state.at) selectRow(subject.shownStep ?? 0);
      if (model.input === "image") showClass(result);
      await view.painted;
    });
    else if (state.view === "steps") run(ask_("walkthrough"), (result, ended) => { stepsView(stage, result, place(), ended); if (model.input === "image") showClass(result); });
    else if (state.view === "beams") run(ask_("beam_search", { width: state.width }), (result) => stage.show(...beams(result, state.width, (changes) => { Object.assign(state, changes); save(); showView(); })));
    else run((stop) => ask("classify_digit", { pixels: subject.input.pixels }, { signal: stop }), (result) => { stage.show(digitView(result, subject.pad)); showClass(null, result.models.find(({ name }) => name === model.name)); });
  }

  // The answer of an image model is the most probable class.
  function showClass(result, classified = null) {
    const best = classified ? classified.probabilities.indexOf(Math.max(...classified.probabilities)) : Number(result.title.split("→").pop());
    answer.text(`${subject.model.name}: the drawing is classified as`, make("span", { className: "tok", textContent: best }));
  }

  const fail = (error) => { status(""); stage.fail(error.message); ready(`error ${state.view}`); };
  const newSignal = () => { viewEnd.abort(); viewEnd = new AbortController(); signal.addEventListener("abort", () => viewEnd.abort(), { signal: viewEnd.signal }); return viewEnd.signal; };
  // The views write their selection to the address; here it becomes the field `at` of the state.
  const place = () => [{ replaceState: (_, __, hash) => { state.at = hash.slice(1); save(); linkHead(); } }, { hash: `#${state.at}` }];

  async function savePage() {
    try {
      const action = { attention: "report_page", steps: "walkthrough_page" }[state.view], html = action ? (await ask(action, subject.input, { signal })).html : await standalonePage();
      download(`${subject.model.name}.html`, new Blob([html], { type: "text/html" }));
    } catch (error) { if (!signal.aborted) stage.fail(error.message); }
  }

  subject.open();
}
