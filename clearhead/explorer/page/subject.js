// The left column of the panels of the group Model: the model, its input, and what it generates. The text is encoded in
// one request, `run`; everything else receives the ids of its result.
import { drawingPad } from "./drawing.js";
import { recorder } from "./recorder.js";
import { Latest, architectureName, ask, button, choices, field, gauge, make, ready, routeError, slider } from "./tools.js";

// w: generated ids, as in "" (generate all), "none", "12,7" or "12,7+" (generate the rest after these);
// t, k, p, n, seed: sampling ("" is the model's own); chat: "no" omits the chat template; ink: strokes of a drawing.
export const SAMPLING = ["t", "k", "p"]; // the numbers of the state whose default is that of the model
export const SUBJECT = { model: "", text: "", w: "", t: "", k: "", p: "", n: 24, seed: 0, chat: "", ink: "" };
const MAX_NEW = 256;
let listing = null; // the models, requested once

const shortCount = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : n >= 1e3 ? `${Math.round(n / 1e3)} k` : String(n));

export class Subject {
  // `accepts(model)` selects the models; `onRun(result)` and `onFail(error)` receive every run; `onModel()` a new model.
  constructor({ state, signal, save, accepts = () => true, onRun, onFail = () => {}, onModel = () => {}, onLoading = () => {}, onNone = null, controls = [] }) {
    Object.assign(this, { state, signal, save, accepts, onRun, onFail, onModel, onLoading, onNone });
    this.requests = new Latest(signal);
    this.listing = new Latest(signal);
    Object.assign(this, { model: null, models: [], last: null, playing: null, step: null });
    this.build(controls);
    signal.addEventListener("abort", () => this.pause());
  }

  build(controls) {
    this.pick = make("select", { on: { change: () => this.selectModel(this.pick.value) } });
    this.text = make("textarea", { rows: 3, spellcheck: false, on: { input: () => this.go({ text: this.text.value, w: "" }) } });
    this.textField = field("Text", this.text);
    this.facts = make("p", { className: "note" });
    this.examples = make("div", { className: "examples" });
    this.chat = make("input", { type: "checkbox", id: "chat-template", on: { change: () => this.go({ chat: this.chat.checked ? "" : "no", w: "" }) } });
    this.chatBox = make("label", { className: "check", htmlFor: "chat-template" }, this.chat, " Apply the chat template");
    this.pad = drawingPad(() => this.go({ ink: this.pad.strokes() }), this.state.ink);
    this.sound = recorder(() => this.go({}), this.signal);
    this.candidates = make("div", { className: "candidates" });
    this.start = button("Restart", () => { this.pause(); this.go({ w: "none" }); }, { title: "Remove all generated tokens" });
    this.back = button("← Back", () => this.stepBack(), { title: "Remove the last token" });
    this.forward = button("Step →", () => this.append(), { title: "Generate one token" });
    this.play = button("▶ Play", () => this.togglePlay(), { title: "Generate one token at a time, from the start" });
    this.rest = button("All", () => { this.pause(); this.go({ w: "" }); }, { title: "Generate until the end" });
    this.sampling = make("details", { className: "sampling" }, make("summary", { textContent: "Sampling" }), make("div", {}));
    this.generation = make("section", { className: "generation", ariaLabel: "Generation" },
      make("div", { className: "transport" }, this.start, this.back, this.forward, this.play, this.rest), this.candidates, this.sampling);
    for (const part of [this.textField, this.chatBox, this.pad.box, this.sound.box, this.generation]) part.hidden = true; // until the model is known
    this.box = make("aside", { className: "subject", ariaLabel: "Model and input" }, (this.modelField = field("Model", this.pick)), this.facts, this.textField, this.chatBox, this.examples,
      this.pad.box, this.sound.box, ...controls, this.generation);
  }

  open() {
    this.onLoading();
    listing ??= ask("models", {});
    this.listing.run(() => listing, ({ models }) => {
      const checkpoints = models.flatMap((model) => model.checkpoints.map((name) => ({ ...model, name, run: model.name })));
      this.models = [...models, ...checkpoints].filter((model) => model.input && this.accepts(model)).sort((a, b) => b.can_generate - a.can_generate);
      if (!this.models.length && this.onNone) return this.onNone();
      if (!this.models.length) return this.onFail(new Error("no model of this page can be shown here; start it with en-es or shakespeare"));
      this.pick.replaceChildren(...this.options());
      this.selectModel(this.state.model, true);
    }, (error) => { listing = null; this.onFail(error); });
  }

  // The options of a select of models: the checkpoints of a run follow the other models, in a group.
  options() {
    const option = ({ name }) => make("option", { value: name, textContent: name }), runs = [...new Set(this.models.map(({ run }) => run).filter(Boolean))];
    return [...this.models.filter(({ run }) => !run).map(option), ...runs.map((name) => make("optgroup", { label: `Checkpoints of ${name}` }, ...this.models.filter(({ run }) => run === name).map(option)))];
  }

  selectModel(name, keepState = false) {
    const model = this.models.find((candidate) => candidate.name === name) ?? this.models[0], { state } = this;
    this.model = model;
    this.modelField.problem(name && name !== model.name ? `“${name}” is not a model of this panel; ${model.name} is shown` : "");
    this.pick.value = model.name;
    this.pause();
    if (!keepState || name !== model.name) Object.assign(state, { text: "", w: "", t: "", k: "", p: "", chat: "" });
    this.facts.textContent = `${architectureName(model.architecture)}, ${shortCount(model.parameters)} parameters${model.input === "text" ? `, up to ${model.max_tokens.toLocaleString("en")} tokens` : ""}`;
    this.facts.title = model.description;
    this.examples.replaceChildren(...(model.input === "text" ? model.examples.map((example) => button(example.replace(/\n/g, " ⏎ "), () => { this.text.value = example; this.go({ text: example, w: "" }); this.text.focus(); }, { title: example })) : []));
    state.text ||= model.input === "text" ? model.examples[0] : "";
    this.text.value = state.text;
    this.chat.checked = state.chat !== "no";
    this.chatBox.hidden = !model.has_chat_template;
    this.textField.hidden = this.examples.hidden = model.input !== "text";
    this.pad.box.hidden = model.input !== "image";
    this.sound.box.hidden = model.input !== "audio";
    if (model.input === "audio") this.sound.setRate(model.sample_rate);
    this.generation.hidden = !model.can_generate;
    this.showSampling();
    this.step = null;
    this.onModel();
    this.go({ model: model.name });
  }

  setting(key, name) { return this.state[key] === "" ? this.model.settings[name] : Number(this.state[key]); }

  showSampling() {
    const sampler = (key, name, label, steps, options, none = null) => slider(label, steps, this.setting(key, name) ?? none, (value) => this.go({ [key]: value, ...(key === "n" || key === "seed" ? { w: "" } : { w: this.state.w }) }), options);
    this.fields = {
      text: this.textField,
      temperature: sampler("t", "temperature", "Temperature (0: greedy)", [0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5], { min: 0, max: 100 }),
      top_k: sampler("k", "top_k", "Top-k (0: all)", [0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 100], { min: 0, max: 1e6, integer: true }, 0),
      top_p: sampler("p", "top_p", "Top-p", [0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1], { min: 0.01, max: 1 }, 1),
      seed: slider("Seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], this.state.seed, (seed) => this.go({ seed }), { min: 0, max: Number.MAX_SAFE_INTEGER, integer: true }),
      max_new_tokens: slider("New tokens", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128], this.state.n, (n) => this.go({ n, w: "" }), { min: 1, max: MAX_NEW, integer: true }),
    };
    const { temperature, top_k: topK, top_p: topP, seed, max_new_tokens: length } = this.fields;
    this.sampling.lastElementChild.replaceChildren(temperature, topK, topP, seed, ...(this.model.has_answer ? [] : [length]));
    this.showMode();
  }

  showMode() {
    const t = this.setting("t", "temperature");
    this.sampling.firstElementChild.textContent = t === 0 ? "Sampling: greedy" : `Sampling: temperature ${t}`;
  }

  // Whether texts are messages, to which the chat template is applied.
  get hasChat() { return this.model.has_chat_template && this.state.chat !== "no"; }

  // The input of the model for all actions but `run`: the ids of the last run.
  get input() {
    if (this.model.input === "image") return { model: this.model.name, pixels: this.pad.bytes() };
    if (this.model.input === "audio") return { model: this.model.name, samples: this.sound.samples() };
    const { ids, source_ids: sourceIds, n_prompt: nPrompt } = this.last;
    return { model: this.model.name, ids, source_ids: sourceIds, n_prompt: nPrompt };
  }

  go(changes) {
    Object.assign(this.state, changes);
    this.save();
    if (!this.model) return;
    this.showMode();
    for (const box of Object.values(this.fields)) if (box === this.textField) box.problem("");
    if (this.model.input === "image") return this.onRun(this.last = { model: this.model.name });
    if (this.model.input === "audio") {
      if (this.sound.isEmpty()) return this.onFail(Object.assign(new Error("Record digits, choose a file, or play the example."), { isEmpty: true }));
      return this.requests.run((stop) => ask("listen", this.input, { signal: stop }), (result) => this.onRun(this.last = { ...result, model: this.model.name }), (error) => this.fail(error));
    }
    this.onLoading();
    this.requests.run((stop) => ask("run", this.runRequest(this.model.name), { signal: stop }), (result) => {
      this.last = { ...result, model: this.model.name };
      if (this.step === null || this.step > result.first_step + result.steps.length) this.step = null;
      this.showCandidates();
      ready(`model ${this.model.name} ${result.ids.length} ${result.next?.selected ?? ""}`);
      this.onRun(this.last);
    }, (error) => this.fail(error), this.state.text.length > 2000 ? 250 : 0);
  }

  // The request of a run of the text, by the shown model or a checkpoint of it.
  runRequest(name) {
    const { w } = this.state, isComplete = w === "" || w.endsWith("+");
    return { model: name, text: this.state.text, chat: this.hasChat,
      generated_ids: w === "none" ? [] : w.split(/[,+]/).filter(Boolean).map(Number), complete: isComplete && this.model.can_generate, max_new_tokens: Number(this.state.n),
      temperature: this.setting("t", "temperature"), top_k: this.setting("k", "top_k") || null, top_p: this.setting("p", "top_p") < 1 ? this.setting("p", "top_p") || null : null, seed: Number(this.state.seed) };
  }

  fail(error) {
    this.pause();
    routeError(error, this.fields ?? {}, (message) => this.onFail(Object.assign(new Error(message), { field: error.field })));
    ready("error");
  }

  // Return the output token that a panel's state names, if the run has it; otherwise null.
  stepOf(text, run = this.last) {
    return text !== "" && run.steps[Number(text) - run.first_step] ? Number(text) : null;
  }

  // Select the output token whose candidates are shown: an index of the generated tokens, or null for the next one.
  select(step) {
    this.step = step;
    this.showCandidates();
  }

  get shownStep() {
    const { steps, next, first_step: first } = this.last;
    if (!steps) return 0; // an image or a sound has no output tokens
    if (this.step !== null && steps[this.step - first]) return this.step;
    if (next) return first + steps.length;
    return first + steps.reduce((least, step, i) => (step.probability < steps[least].probability ? i : least), 0); // the least certain token
  }

  showCandidates() {
    const result = this.last, { steps, next, first_step: first } = result;
    if (!this.model.can_generate) return;
    const at = this.shownStep, step = steps[at - first] ?? next, isNext = !steps[at - first];
    const largest = Math.max(...step.candidates.map((candidate) => Math.max(candidate.probability, candidate.model_probability)), 1e-9);
    const format = (p) => (p >= 0.001 ? p.toFixed(3) : p > 0 ? "<0.001" : "0"), isGreedy = this.setting("t", "temperature") === 0;
    const name = result.tokens[result.n_prompt + at]?.trim() || result.tokens[result.n_prompt + at];
    this.candidates.replaceChildren(make("table", { className: "plain probabilities" },
      make("caption", {}, isNext ? "Next token" : "Instead of ", ...(isNext ? [] : [make("b", { textContent: name })]), make("small", { textContent: ` entropy ${step.entropy.toFixed(2)} nats; ${step.n_candidates === 1 ? "greedy" : `${step.n_candidates.toLocaleString("en")} of ${result.vocab_size.toLocaleString("en")} tokens are sampled from`}` })),
      make("tbody", {}, ...step.candidates.map(({ id, token, probability, model_probability: own }) => make("tr", { className: id === step.taken ? "selected" : "" },
        make("th", { scope: "row" }, make("button", { type: "button", textContent: token, ariaLabel: `${token}: choose this token`, title: isNext ? "Append this token" : "Choose this token, and generate the rest", on: { click: () => this.choose(at, id, isNext) } })),
        gauge(own / largest, isGreedy ? null : probability / largest), make("td", { textContent: format(own) }))))),
    make("p", { className: "note", textContent: `Select a token to write it instead.${isGreedy ? "" : " Bar: the model's probability. Tick: after temperature, top-k and top-p."}` }));
    const isFull = result.ids.length >= this.model.max_tokens || result.is_end;
    this.back.disabled = this.start.disabled = !result.steps.length;
    this.forward.disabled = isFull;
    this.play.textContent = this.playing ? "❚❚ Pause" : "▶ Play";
  }

  get generatedIds() { return this.last.ids.slice(this.last.n_prompt); }

  // Choose a token at an output position; the tokens after it are generated again.
  choose(at, id, isNext) {
    this.pause();
    const ids = [...this.generatedIds.slice(0, at), id];
    this.step = isNext ? null : at;
    this.go({ w: ids.join(",") + (isNext ? "" : "+") });
  }

  append() { if (this.last?.next) this.go({ w: [...this.generatedIds, this.last.next.selected].join(",") }); }
  stepBack() { this.pause(); this.step = null; this.go({ w: this.generatedIds.slice(0, -1).join(",") || "none" }); }
  pause() { clearTimeout(this.playing); this.playing = null; this.play.textContent = "▶ Play"; }

  // Generate one token at a time until a stop token, the number of new tokens, or a click on Pause.
  togglePlay() {
    if (this.playing) return this.pause();
    this.step = null;
    const limit = this.last.is_end || this.model.has_answer ? Infinity : Number(this.state.n);
    if (this.last.is_end || this.generatedIds.length >= limit) this.go({ w: "none" });
    const tick = (previous) => {
      if (this.last === previous) return void (this.playing = setTimeout(() => tick(previous), 30)); // not arrived yet
      if (this.last.is_end || !this.last.next || this.generatedIds.length >= limit) return this.pause();
      const before = this.last;
      this.append();
      this.playing = setTimeout(() => tick(before), 250);
    };
    const before = this.last.is_end || this.generatedIds.length >= limit ? this.last : null;
    this.playing = setTimeout(() => tick(before), 0);
    this.play.textContent = "❚❚ Pause";
  }
}

// Add the default state and the left column to a panel, and return the subject, the answer line and the stage.
export const modelLayout = (box, subject, ...stage) => box.append(make("div", { className: "layout" }, subject.box, make("div", { className: "stage-column" }, ...stage)));
export { choices };
