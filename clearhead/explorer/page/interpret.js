// Interpret: the logit lens, the reasons of one output token, activation patching, induction scores, and neurons.
import { heatGrid, scrollToColumn } from "./heat.js";
import { answerLine } from "./output.js";
import { saveButton } from "./save.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, button, choices, field, gauge, layerName, make, pane, progress, readState, ready, routeError, status } from "./tools.js";

// view: the method; step: the output token; other: the text of patching; block: of the neurons.
const DEFAULTS = { ...SUBJECT, view: "lens", step: "", other: "", block: 0 };
const VIEWS = [["lens", "Logit lens"], ["why", "Why this token?"], ["patching", "Patching"], ["induction", "Induction"], ["neurons", "Neurons"]];
const VERDICTS = { confirmed: "confirmed by ablation", compensated: "mostly compensated by later parts", refuted: "refuted by ablation" };
const signed = (value) => `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
const short = (path) => path.replace(/(^|\.)blocks\./, "$1");

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: SAMPLING, views: VIEWS }), requests = new Latest(signal), stage = pane("interpretation"), save = () => remember(state, DEFAULTS);
  const answer = answerLine((step) => { state.step = String(step); subject.select(step); answer.show(subject.last, step); save(); if (["why", "patching"].includes(state.view)) showView(); });
  const views = choices("Method", VIEWS, state.view, (view) => { state.view = view; save(); showView(); });
  const other = field("A second text with the same number of tokens", make("textarea", { rows: 2, spellcheck: false, value: state.other, on: { input(event) { state.other = event.target.value; save(); showView(300); } } }));
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0, onRun, onFail: (error) => stage.fail(error.message), onLoading: () => stage.loading(),
    onModel: () => { views.querySelector('[data-name="induction"]').hidden = subject.model.architecture !== "Decoder"; if (state.view === "induction" && subject.model.architecture !== "Decoder") views.set(state.view = "lens"); } });
  other.classList.add("second-text");
  modelLayout(box, subject, answer, make("div", { className: "bar stage-bar" }, views, saveButton("interpret")), other, stage);

  const step = () => subject.stepOf(state.step) ?? subject.shownStep;

  function onRun(run) {
    subject.step = subject.stepOf(step());
    subject.showCandidates();
    answer.show(run, subject.step);
    showView();
  }

  function showView(wait = 0) {
    if (!subject.last) return;
    other.hidden = state.view !== "patching";
    other.problem("");
    if (state.view === "patching") return state.other ? showPatching(wait) : showPatchingExample();
    const [action, more, show] = { lens: ["logit_lens", {}, lens], why: ["explain_token", { step: step() }, why], induction: ["induction", null, induction], neurons: ["neurons", { block: Number(state.block) }, neurons] }[state.view];
    stage.loading();
    requests.run((stop) => ask(action, more ? { ...subject.input, ...more } : { model: subject.model.name }, { signal: stop, onProgress: progress }), (result) => {
      status("");
      stage.show(...show(result));
      if (state.view === "lens") scrollToColumn(stage, target(subject.last.n_prompt - 1 + step())); // the position that writes the selected token
      document.documentElement.dataset.shown = state.view;
    }, (error) => { status(""); routeError(error, { other_text: other }, (message) => stage.fail(message)); ready("error"); }, wait);
  }

  // The blocks are requested a few at a time, from the last one, so that the grids of a deep model fill step by step.
  function showPatching(wait) {
    const { blocks, parameters } = subject.model, pending = [...blocks].reverse(), size = parameters > 5e7 ? 1 : parameters > 5e6 ? 4 : 8, done = new Map();
    let last = null;
    const fail = (error) => { routeError(error, { other_text: other }, (message) => stage.fail(message)); ready("error"); };
    stage.loading();
    requests.run(async (stop) => {
      while (pending.length) {
        const part = await ask("patching_grid", { ...subject.input, step: last ? last.step : state.step === "" ? null : step(), other_text: state.other, chat: subject.hasChat, blocks: pending.splice(0, size) }, { signal: stop });
        for (const grid of part.grids) grid.rows.forEach((path, i) => done.set(path, grid.restored[i]));
        last = { ...part, grids: [...(last?.grids.filter(({ stack }) => !part.grids.some((grid) => grid.stack === stack)) ?? []), ...part.grids] };
        stage.show(...patching(last, blocks, done, pending.length));
      }
    }, () => { document.documentElement.dataset.shown = "patching"; }, fail, wait);
  }

  // Without a second text, say what patching needs and offer a pair of texts.
  function showPatchingExample() {
    const { contrast } = subject.model, use = () => { state.other = other.querySelector("textarea").value = contrast[1]; subject.text.value = contrast[0]; state.step = ""; subject.go({ text: contrast[0], w: "" }); };
    stage.empty("Write a second text of the same length that makes the model write something else, for example with one other word. ");
    if (contrast.length) stage.querySelector(".pane-note").append(button(`Example: “${contrast[0].trim()}” and “${contrast[1].trim()}”`, use));
    ready("patching empty");
  }

  const target = (i) => `t${i}`;

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
    return [make("p", { className: "note" }, "The logit of ", make("b", { textContent: token }), ` is ${logit.toFixed(2)}: the sum of what every part adds to it directly. Removing a part tests that: a part that adds to the logit is confirmed if the logit then falls. Head 2.5 is head 5 of layer 2, counted from 0. A percentage is a token's share of what the head adds; in brackets, the change of the logit without this token.`),
      make("table", { className: "plain why" }, make("thead", {}, make("tr", {}, ...["tokens read", "part", "direct contribution", "change without it", "verdict"].map((text) => make("th", { scope: "col", textContent: text })))),
        make("tbody", {}, ...parts.map(({ name, path, head, value, ablation, verdict, sources }) => make("tr", { className: verdict }, make("td", { className: "reads" }, ...sources.filter(({ share }, i) => i === 0 || share >= 0.02).map((edge) => link(path, edge)), sources.length ? "" : make("span", { className: "note", textContent: "the residual stream here" })),
          make("th", { scope: "row" }, make("a", { href: edit(path, head), textContent: nameOf(name, path, head), title: `Intervene on ${path}` })), signedBar(value, largest), signedBar(ablation, largest), make("td", { className: "verdict-cell", textContent: VERDICTS[verdict] }))),
        make("tr", {}, make("td"), make("th", { scope: "row", textContent: `${nOthers} other parts` }), make("td", { className: "signed" }, make("small", { textContent: signed(others) })), make("td"), make("td"))))];
  }

  // "head 2.5, cross-attention" or "block 2, feed-forward"
  const nameOf = (name, path, head) => { const [place, ...kind] = name.replace("_", "-").split(" "); return `${head === null ? "block" : "head"} ${place}, ${kind.join(" ") === "attention" && head !== null ? "self-attention" : kind.join(" ")}`; };

  function signedBar(value, largest) {
    const cell = gauge(Math.abs(value) / largest);
    cell.classList.add("signed");
    cell.classList.toggle("negative", value < 0);
    cell.append(make("small", { textContent: signed(value) }));
    return cell;
  }

  function patching({ step: explained, target: token, clean, corrupted, grids }, blocks, done, nPending) {
    if (explained !== null && subject.last.steps[explained - subject.last.first_step]) { subject.select(explained); answer.show(subject.last, explained); }
    return [make("p", { className: "note" }, "The logit of ", make("b", { textContent: token }), ` is ${clean.toFixed(2)} in this run and ${corrupted.toFixed(2)} with the second text. A cell is the share of the difference that one activation of this run, put into the other run, restores. Select an output token above to ask about it.${nPending ? ` (${blocks.length - nPending} of ${blocks.length} blocks computed …)` : ""}`),
      ...[...grids].sort((a, b) => (a.stack < b.stack ? 1 : -1)).map((grid) => ({ ...grid, rows: blocks.filter((path) => path.startsWith(grid.stack ? `${grid.stack}.` : "")) })).flatMap(({ stack, rows, first, tokens: allTokens, other_tokens: allOthers }) => {
        const tokens = allTokens.slice(first), otherTokens = allOthers.slice(first);
        return [make("h3", { textContent: stack ? `${stack[0].toUpperCase()}${stack.slice(1)} blocks` : "Blocks" }), heatGrid({ caption: `1 restores the logit fully.${first ? " Earlier tokens are the same in both runs and restore nothing." : ""}`, corner: "block ↓ position →", largest: 1, className: tokens.length > 48 ? "tiny" : rows.length > 12 || tokens.length > 16 ? "deep small patched" : "patched",
        rows: rows.map((path) => ({ label: short(path), title: path })), columns: tokens.map((text, i) => ({ label: text === otherTokens[i] ? text.trim() || text : `${otherTokens[i].trim()} → ${text.trim()}`, token: `${stack === "encoder" ? "s" : "t"}${i + first}` })), values: rows.map((path) => done.get(path)?.slice(first) ?? tokens.map(() => null)) })];
      })];
  }

  function induction(scores) {
    const names = [["induction", "Induction heads", "weight on the token after the previous occurrence"], ["duplicate", "Duplicate-token heads", "weight on the previous occurrence"], ["previous", "Previous-token heads", "weight on the token before"]];
    return [make("p", { className: "note", textContent: "Random tokens, repeated once: the share of its attention that each head puts on one position, as a mean over the second copy." }),
      make("div", { className: "sides three" }, ...names.map(([name, title, meaning]) => make("section", { className: "side" }, make("h3", { textContent: title }), heatGrid({ caption: meaning, corner: "layer ↓ head →", signed: false, largest: 1, className: scores.rows.length > 12 ? "deep" : "small",
        rows: scores.rows.map((path) => ({ label: short(path).replace(".attention", ""), title: path })), columns: scores[name][0].map((_, head) => ({ label: String(head) })), values: scores[name].map((row) => row.map((value) => (Number.isFinite(value) ? value : undefined))) }))))];
  }

  function neurons({ paths, path, tokens, is_source: isSource, n_neurons: n, share_positive: share, neurons: listed }) {
    const pick = field("Feed-forward network", make("select", { on: { change(event) { state.block = event.target.value; save(); showView(); } } }, ...paths.map((name, i) => make("option", { value: i, textContent: layerName(name), title: name, selected: name === path }))));
    return [pick, make("p", { className: "note", textContent: `The ${listed.length} of ${n.toLocaleString("en")} neurons with the largest activation on this text, strongest first; ${(100 * share).toFixed(0)} % of all activations are positive. Rows: the index of a neuron, and the token with its largest activation.` }),
      heatGrid({ caption: "activation", corner: "neuron ↓ token →", className: tokens.length > 32 ? "tiny" : "small", rows: listed.map(({ index, activations }) => ({ label: `${index} “${tokens[activations.indexOf(Math.max(...activations))]?.trim()}”`, title: `neuron ${index}` })),
        columns: tokens.map((text, i) => ({ label: text.trim() || text, token: `${isSource ? "s" : "t"}${i}` })), values: listed.map(({ activations }) => activations) })];
  }

  subject.open();
}
