// Interpret: the logit lens, the reasons of one output token, activation patching, induction scores, and neurons.
import { heatGrid } from "./heat.js";
import { answerLine } from "./output.js";
import { saveButton } from "./save.js";
import { SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, choices, field, gauge, layerName, make, pane, progress, ready, routeError, status } from "./tools.js";

// view: the method; step: the output token; other: the text of patching; block: of the neurons.
const DEFAULTS = { ...SUBJECT, view: "lens", step: "", other: "", block: 0 };
const VIEWS = [["lens", "Logit lens"], ["why", "Why this token?"], ["patching", "Patching"], ["induction", "Induction"], ["neurons", "Neurons"]];
const VERDICTS = { confirmed: "confirmed by ablation", compensated: "mostly compensated by later parts", refuted: "refuted by ablation" };
const signed = (value) => `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
const short = (path) => path.replace(/(^|\.)blocks\./, "$1");

export function open(box, initial, { signal, remember }) {
  const state = { ...DEFAULTS, ...initial }, requests = new Latest(signal), stage = pane("interpretation"), save = () => remember(state, DEFAULTS);
  const answer = answerLine((step) => { state.step = String(step); subject.select(step); answer.show(subject.last, step); save(); if (["why", "patching"].includes(state.view)) showView(); });
  const views = choices("Method", VIEWS, state.view, (view) => { state.view = view; save(); showView(); });
  const other = field("A second text with the same number of tokens", make("input", { type: "text", value: state.other, className: "wide", on: { input(event) { state.other = event.target.value; save(); showView(300); } } }));
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0, onRun, onFail: (error) => stage.fail(error.message), onLoading: () => stage.loading(),
    onModel: () => { views.querySelector('[data-name="induction"]').hidden = subject.model.architecture !== "Decoder"; if (state.view === "induction" && subject.model.architecture !== "Decoder") views.set(state.view = "lens"); } });
  modelLayout(box, subject, answer, make("div", { className: "bar stage-bar" }, views, saveButton("interpret")), other, stage);

  const step = () => (state.step !== "" && Number(state.step) < subject.last.steps.length ? Number(state.step) : Math.min(subject.shownStep, subject.last.steps.length));

  function onRun(run) {
    subject.step = run.steps[step()] ? step() : null;
    subject.showCandidates();
    answer.show(run, subject.step);
    showView();
  }

  function showView(wait = 0) {
    if (!subject.last) return;
    other.hidden = state.view !== "patching";
    other.problem("");
    if (state.view === "patching" && !state.other) return stage.empty("Write a second text of the same length that makes the model write something else, for example with one other word.");
    const [action, more, show] = { lens: ["logit_lens", {}, lens], why: ["explain_token", { step: step() }, why], patching: ["patching_grid", { step: step(), other_text: state.other }, patching], induction: ["induction", null, induction], neurons: ["neurons", { block: Number(state.block) }, neurons] }[state.view];
    stage.loading();
    requests.run((stop) => ask(action, more ? { ...subject.input, ...more } : { model: subject.model.name }, { signal: stop, onProgress: progress }), (result) => {
      status("");
      stage.show(...show(result));
      if (state.view === "lens") showColumn();
      document.documentElement.dataset.shown = state.view;
    }, (error) => { status(""); routeError(error, { other_text: other }, (message) => stage.fail(message)); ready("error"); }, wait);
  }

  const target = (i) => `t${i}`;

  // Scroll a wide grid to the position that writes the selected token.
  function showColumn() {
    const { source, n_prompt: nPrompt } = subject.last, heading = stage.querySelector(`th[data-token="${target(nPrompt - 1 + step())}"]`), box = heading?.closest(".scroll");
    if (box) box.scrollLeft += heading.getBoundingClientRect().right - box.getBoundingClientRect().right + (source.length ? 0 : 40);
  }

  function lens({ rows, positions, tokens, texts, probabilities, ranks }) {
    const order = rows.map((_, i) => rows.length - 1 - i), final = texts.at(-1);
    return [make("p", { className: "note", textContent: "The model's own final norm and unembedding, applied to the residual stream after every block. Each cell is the most probable next token there; the top row is the model's output." }),
      heatGrid({ caption: "probability of the most probable token", corner: "after ↓ token read →", signed: false, largest: 1, rows: order.map((i) => ({ label: short(rows[i]), title: rows[i] })),
        columns: tokens.map((label, j) => ({ label: label.trim() || label, token: target(positions[j]) })), values: order.map((i) => probabilities[i]), texts: order.map((i) => texts[i].map((text) => text.trim() || text)),
        title: (i, j) => `${rows[order[i]]}: ${texts[order[i]][j]} ${probabilities[order[i]][j].toFixed(3)}; the final prediction ${final[j]} has rank ${ranks[order[i]][j] + 1} here` })];
  }

  // The graph: sources on the left, parts in the middle, the token on the right; each row carries its ablation.
  function why({ target: token, logit, parts, others, n_others: nOthers }) {
    const largest = Math.max(...parts.map(({ value, ablation }) => Math.max(Math.abs(value), Math.abs(ablation)))), { source, tokens } = subject.last;
    const sourceToken = (path, key) => (path.includes("cross_attention") ? [source[key], `s${key}`] : [tokens[key], `t${key}`]);
    const link = (path, { key, share, ablation }) => {
      const [text, name] = sourceToken(path, key), chip = make("span", { className: "source-chip", title: `${(100 * share).toFixed(0)} % of what the head adds; without this edge the logit changes by ${signed(ablation)}` }, text, make("small", { textContent: ` ${(100 * share).toFixed(0)} % (${signed(ablation)})` }));
      chip.dataset.token = name;
      chip.style.setProperty("--w", `${Math.round(70 * share)}%`);
      return chip;
    };
    const edit = (path, head) => `#intervention?${new URLSearchParams({ ...Object.fromEntries(Object.keys(SUBJECT).map((key) => [key, state[key]]).filter(([key, value]) => String(value) !== String(SUBJECT[key]))), edits: `${path}:${head ?? ""}:zero`, step: String(step()) })}`;
    return [make("p", { className: "note" }, "The logit of ", make("b", { textContent: token }), ` is ${logit.toFixed(2)}: the sum of what every part adds to it directly. Removing a part tests that: a part is confirmed if the logit then falls.`),
      make("table", { className: "plain why" }, make("thead", {}, make("tr", {}, ...["reads", "part", "direct contribution", "change without it", "verdict"].map((text) => make("th", { scope: "col", textContent: text })))),
        make("tbody", {}, ...parts.map(({ name, path, head, value, ablation, verdict, sources }) => make("tr", { className: verdict }, make("td", { className: "reads" }, ...sources.filter(({ share }, i) => i === 0 || share >= 0.02).map((edge) => link(path, edge)), sources.length ? "" : make("span", { className: "note", textContent: "the stream at this position" })),
          make("th", { scope: "row" }, make("a", { href: edit(path, head), textContent: name.replace("_", "-"), title: `Intervene on ${path}` })), signedBar(value, largest), signedBar(ablation, largest), make("td", { className: "verdict-cell", textContent: VERDICTS[verdict] }))),
        make("tr", {}, make("td"), make("th", { scope: "row", textContent: `${nOthers} other parts` }), signedBar(others, Math.max(largest, Math.abs(others))), make("td"), make("td"))))];
  }

  function signedBar(value, largest) {
    const cell = gauge(Math.abs(value) / largest);
    cell.classList.add("signed");
    cell.classList.toggle("negative", value < 0);
    cell.append(make("small", { textContent: signed(value) }));
    return cell;
  }

  function patching({ target: token, clean, corrupted, grids }) {
    return [make("p", { className: "note" }, "The logit of ", make("b", { textContent: token }), ` is ${clean.toFixed(2)} in this run and ${corrupted.toFixed(2)} with the second text. A cell is the share of the difference that one activation of this run, put into the other run, restores.`),
      ...grids.flatMap(({ stack, rows, tokens, other_tokens: otherTokens, restored }) => [make("h3", { textContent: stack || "Blocks" }), heatGrid({ caption: "1 restores the logit fully", corner: "block ↓ position →", largest: 1, className: tokens.length > 24 ? "tiny" : "",
        rows: rows.map((path) => ({ label: short(path), title: path })), columns: tokens.map((text, i) => ({ label: text === otherTokens[i] ? text.trim() || text : `${otherTokens[i].trim()} → ${text.trim()}`, token: `${stack === "encoder" ? "s" : "t"}${i}` })), values: restored })])];
  }

  function induction(scores) {
    const names = [["induction", "Induction: weight on the token after the previous occurrence"], ["duplicate", "Duplicate token: weight on the previous occurrence"], ["previous", "Previous token"]];
    return [make("p", { className: "note", textContent: "Every head on random tokens that are repeated once: the share of its attention on the position in question." }),
      make("div", { className: "sides" }, ...names.map(([name, title]) => heatGrid({ caption: title, corner: "layer ↓ head →", signed: false, largest: 1, className: scores.rows.length > 12 ? "deep" : "small",
        rows: scores.rows.map((path) => ({ label: short(path).replace(".attention", ""), title: path })), columns: scores[name][0].map((_, head) => ({ label: String(head) })), values: scores[name].map((row) => row.map((value) => (Number.isFinite(value) ? value : undefined))) })))];
  }

  function neurons({ paths, path, tokens, is_source: isSource, n_neurons: n, share_positive: share, neurons: listed }) {
    const pick = field("Feed-forward network", make("select", { on: { change(event) { state.block = event.target.value; save(); showView(); } } }, ...paths.map((name, i) => make("option", { value: i, textContent: layerName(name), title: name, selected: name === path }))));
    return [pick, make("p", { className: "note", textContent: `The ${listed.length} of ${n.toLocaleString("en")} neurons with the largest activation on this text, strongest first; ${(100 * share).toFixed(0)} % of all activations are positive.` }),
      heatGrid({ caption: "activation", corner: "neuron ↓ token →", className: tokens.length > 24 ? "tiny" : "small", rows: listed.map(({ index, activations }) => ({ label: `${index}  ${tokens[activations.indexOf(Math.max(...activations))]?.trim()}`, title: `neuron ${index}` })),
        columns: tokens.map((text, i) => ({ label: text.trim() || text, token: `${isSource ? "s" : "t"}${i}` })), values: listed.map(({ activations }) => activations) })];
  }

  subject.open();
}
