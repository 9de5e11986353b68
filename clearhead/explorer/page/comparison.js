// Compare: two texts, two models or two checkpoints, side by side, with the difference in every view.
import { diffLine } from "./diff.js";
import { rowsOf } from "./causal_map.js";
import { format, heatGrid, scrollToColumn } from "./heat.js";
import { answerLine } from "./output.js";
import { saveButton } from "./save.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, choices, field, gauge, layerName, make, pane, progress, readState, ready, routeError, status } from "./tools.js";

// view: the view; model2, text2: the second run ("": as the first); own: "yes" lets the second model read its own output
// and not that of the first; layer, head: of the weights; step: the output token.
const DEFAULTS = { ...SUBJECT, view: "attention", model2: "", text2: "", own: "", layer: "", head: "", step: "" };
const VIEWS = [["outputs", "Outputs"], ["attention", "Attention"], ["lens", "Logit lens"], ["streams", "Residual stream"], ["ablations", "Causal map"]];
const short = (path) => path.replace(/(^|\.)blocks\./, "$1").replace(/\.attention$/, " self").replace(".cross_attention", " cross");
const shown = (text) => text.trim() || text;

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: [...SAMPLING, "head"], views: VIEWS }), runs = new Latest(signal), requests = new Latest(signal), stage = pane("comparison"), save = () => remember(state, DEFAULTS);
  const onSelect = (step) => { state.step = String(step); save(); showAnswers(); if (["outputs", "ablations"].includes(state.view)) showView(); };
  const answer = answerLine(onSelect), answer2 = answerLine(onSelect);
  const pick = make("select", { on: { change() { Object.assign(state, { model2: pick.value === subject.model.name ? "" : pick.value, layer: "", head: "" }); runSecond(); } } });
  const text = make("textarea", { rows: 2, spellcheck: false, on: { input() { state.text2 = text.value === state.text ? "" : text.value; runSecond(250); } } });
  const textField = field("Second text", text);
  const own = make("input", { type: "checkbox", id: "second-own", checked: state.own === "yes", on: { change() { state.own = own.checked ? "yes" : ""; runSecond(); } } });
  const ownBox = make("label", { className: "check", htmlFor: "second-own", title: "Without this, the second model reads the tokens of the first run, so that every position can be compared" }, own, " The second model reads its own output");
  const controls = make("section", { className: "tools" }, make("h3", { textContent: "Second run" }), field("Second model", pick), textField, ownBox);
  const views = choices("View", VIEWS, state.view, (view) => { state.view = view; save(); showView(); });
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0, controls: [controls], onModel, onRun, onFail: (error) => stage.fail(error.message), onLoading: () => stage.loading() });
  const side = (name, line) => make("section", { className: "compared" }, make("h2", { className: "run-name", textContent: name }), line);
  const names = ["First", "Second"].map((name, i) => side(name, [answer, answer2][i]));
  modelLayout(box, subject, make("div", { className: "pair" }, ...names), make("div", { className: "bar stage-bar" }, views, saveButton("comparison")), stage);
  let second = null, model2 = null;

  // Without a second run in the address, start with two texts that differ by a word.
  function onModel() {
    const { contrast } = subject.model;
    pick.replaceChildren(...subject.options());
    if (!subject.models.some(({ name }) => name === state.model2)) state.model2 = "";
    pick.value = state.model2 || subject.model.name;
    if (!state.model2 && !state.text2 && contrast.length && [subject.model.examples[0], ...contrast].includes(state.text)) {
      state.text = subject.text.value = contrast[0];
      state.text2 = contrast[1];
    }
    text.value = state.text2 || state.text;
    if (!subject.model.layers.some(({ path }) => path === state.layer)) Object.assign(state, { layer: "", head: "" });
  }

  function onRun() {
    if (!state.text2) text.value = state.text;
    runSecond();
  }

  // Run the second input to its end, with the settings of its model.
  function runSecond(wait = 0) {
    save();
    if (!subject.last) return;
    model2 = subject.models.find(({ name }) => name === (state.model2 || subject.model.name));
    ownBox.hidden = Boolean(state.text2) || !state.model2;
    textField.problem("");
    if (!state.model2 && !state.text2) { second = null; showAnswers(); return stage.empty("Both runs are the same. Change the second text, or choose a second model or checkpoint."); }
    const body = { model: model2.name, text: state.text2 || state.text, chat: model2.has_chat_template && state.chat !== "no", complete: true, max_new_tokens: Number(state.n), seed: Number(state.seed), temperature: state.model2 ? model2.settings.temperature : subject.setting("t", "temperature") };
    stage.loading();
    runs.run((stop) => ask("run", body, { signal: stop }), (result) => { second = result; if (state.step === "") subject.select(step(subject.last)); showAnswers(); showView(); }, (error) => routeError(error, { text: textField }, (message) => stage.fail(message)), wait);
  }

  const lastStep = (run) => run.first_step + Math.max(0, run.steps.length - 1);
  const generated = (run) => run.ids.slice(run.n_prompt).map((id, i) => run.tokens[run.n_prompt + i]);
  // The first output token that differs, or -1.
  const firstDifference = () => (second ? generated(subject.last).findIndex((token, i) => token !== generated(second)[i]) : -1);
  const step = (run) => {
    const selected = subject.stepOf(state.step, run);
    if (selected !== null) return selected;
    const at = firstDifference();
    return Math.min(at < 0 ? subject.shownStep : at, lastStep(run));
  };

  function showAnswers() {
    names[0].firstChild.textContent = `First: ${subject.model.name}`;
    answer.show(subject.last, step(subject.last));
    names[1].hidden = !second;
    if (!second) return;
    names[1].firstChild.textContent = `Second: ${model2.name}`;
    answer2.show(second, step(second));
    names[1].querySelector(".now-writes")?.remove();
    if (second.text !== subject.last.text) names[1].append(make("p", { className: "now-writes" }, make("small", { textContent: "difference " }), diffLine(subject.last.text, second.text)));
  }

  // The inputs of both runs. If only the models differ and their vocabularies agree, the second one reads the same tokens.
  function inputs() {
    const first = subject.input, { vocab_size: size } = subject.last, isShared = state.model2 && !state.text2 && !own.checked && size === second.vocab_size;
    const { ids, source_ids: sourceIds, n_prompt: nPrompt } = isShared ? subject.last : second;
    return { first, second: { model: model2.name, ids, source_ids: sourceIds, n_prompt: nPrompt } };
  }

  function showView() {
    if (!second) return;
    document.documentElement.removeAttribute("data-shown");
    stage.loading();
    const done = () => { status(""); document.documentElement.dataset.shown = state.view; ready(`comparison ${state.view}`); };
    const fail = (error) => { status(""); stage.fail(error.message); ready("error"); };
    if (state.view === "ablations") return showAblations(done, fail);
    const [action, more, show] = { outputs: ["compare_outputs", {}, outputs], attention: ["compare_attention", { layer: state.layer, head: state.head === "" ? null : Number(state.head) }, attention], lens: ["compare_lenses", {}, lens], streams: ["compare_streams", {}, streams] }[state.view];
    requests.run((stop) => ask(action, { ...inputs(), ...more }, { signal: stop, onProgress: progress }), (result) => { stage.show(...show(result)); if (state.view === "lens") scrollToColumn(stage, `t${subject.last.n_prompt - 1 + step(subject.last)}`); done(); }, fail, 60);
  }

  const columnsOf = ({ tokens, positions, stack }) => tokens.map((label, i) => ({ label: shown(label), token: `${stack}${positions[i]}` }));
  const part = (title, ...content) => make("section", { className: "compared-part" }, make("h3", { textContent: title }), ...content);
  // The first run, the second run and the difference; the difference is on top if the pictures are too large for one row.
  const pictures = (isLarge, first, second_, change) => make("div", { className: "trio" }, ...(isLarge ? [change, first, second_] : [first, second_, change]));
  const difference = "Difference: second − first";

  function outputs({ columns, is_comparable: isComparable }) {
    const tables = [[subject.last, "First"], [second, "Second"]].map(([run, name]) => {
      const at = step(run), { candidates, taken } = run.steps[at - run.first_step] ?? run.next;
      const largest = Math.max(...candidates.map(({ model_probability: p }) => p));
      return make("table", { className: "plain probabilities" }, make("caption", { textContent: `${name}: candidates for output token ${at + 1}` }), make("tbody", {}, ...candidates.slice(0, 8).map(({ token, model_probability: p, id }) => make("tr", { className: id === taken ? "selected" : "" }, make("th", { scope: "row", textContent: token }), gauge(p / largest), make("td", { textContent: p >= 0.001 ? p.toFixed(3) : "<0.001" })))));
    });
    const grid = heatGrid({ caption: isComparable ? "probability of each output token of the first run, in both runs; empty: a token without partner in the second run" : "the vocabularies differ, so the second model has no probability for these tokens", corner: "run ↓ token →", largest: 1, className: "outputs",
      rows: [{ label: "first" }, { label: "second" }, { label: "difference" }], columns: columns.map(({ token, position }) => ({ label: shown(token), token: `t${position}` })), values: ["first", "second", "difference"].map((name) => columns.map((column) => column[name] ?? undefined)) });
    return [grid, make("div", { className: "sides top-gap" }, ...tables)];
  }

  function attention({ rows, layer, head, maps }) {
    const nHeads = Math.max(...rows.map(({ heads }) => heads.length));
    const choose = (i, j) => { Object.assign(state, { layer: rows[i].path, head: String(j) }); save(); showView(); };
    const overview = heatGrid({ caption: "share of the attention of a head that moves between the runs (total variation); click a head to see it", corner: "layer ↓ head →", signed: false, largest: Math.max(0.05, ...rows.flatMap(({ heads }) => heads)), className: rows.length > 16 ? "map-grid deep" : "map-grid small",
      rows: rows.map(({ path }) => ({ label: short(path), title: path })), columns: Array.from({ length: nHeads }, (_, h) => ({ label: String(h), title: `head ${h}` })), values: rows.map(({ heads }) => Array.from({ length: nHeads }, (_, h) => heads[h])), onClick: choose, title: (i, j) => `${rows[i].path}, head ${j}: ${rows[i].heads[j].toFixed(3)}` });
    overview.cell(rows.findIndex(({ path }) => path === layer), head).classList.add("chosen");
    const isCross = layer.endsWith("cross_attention"), isLong = Math.max(...maps.map(({ rows: axis, columns: other }) => Math.max(axis.tokens.length, other.tokens.length))) > 16;
    const grid = (map, i) => heatGrid({ caption: i === 2 ? "blue: more attention in the second run; orange: less; empty: a token without partner" : "attention weights", corner: "query ↓ key →", signed: i === 2, largest: 1, className: isLong ? "tiny" : "small",
      rows: columnsOf(map.rows), columns: columnsOf(map.columns), values: map.values.map((row) => row.map((value) => value ?? undefined)), title: (r, c) => `${shown(map.rows.tokens[r])} → ${shown(map.columns.tokens[c])}: ${map.values[r][c].toFixed(3)}` });
    return [make("div", { className: "beside" }, overview, make("div", {}, make("h2", { className: "where", textContent: `${layerName(layer)}, head ${head}` }), make("p", { className: "note", textContent: isCross ? "A row is the token about to be written, a column a token of the source." : "A row is the token that attends, a column the token that it attends to." }),
      pictures(isLong, part(`First: ${subject.model.name}`, grid(maps[0], 0)), part(`Second: ${model2.name}`, grid(maps[1], 1)), part(difference, grid(maps[2], 2)))))];
  }

  function lens({ sides, difference: change, is_comparable: isComparable }) {
    const grid = ({ rows, tokens, positions, texts, probabilities }, values = probabilities, labels = texts, signed = false, caption = "probability of the most probable next token") => {
      const order = rows.map((_, i) => rows.length - 1 - i);
      return heatGrid({ caption, corner: "after ↓ token read →", signed, largest: 1, className: rows.length > 12 ? "deep" : "", rows: order.map((i) => ({ label: short(rows[i]), title: rows[i] })), columns: tokens.map((label, j) => ({ label: shown(label), token: `t${positions[j]}` })),
        values: order.map((i) => values[i].map((value) => value ?? undefined)), texts: order.map((i) => labels[i].map(shown)), title: (i, j) => `${rows[order[i]]}: ${labels[order[i]][j]} ${values[order[i]][j]?.toFixed(3) ?? ""}` });
    };
    const labels = change.map((row) => row.map((value) => (value === null ? "" : value === -1 ? "≠" : format(value))));
    return [make("p", { className: "note", textContent: "The most probable next token after every block; the top row is the model's output." }),
      pictures(sides[0].rows.length > 12, part(`First: ${subject.model.name}`, grid(sides[0])), part(`Second: ${model2.name}`, grid(sides[1])), part(difference, isComparable ? grid(sides[0], change, labels, true, "change of the probability; ≠: the two runs predict different tokens; empty: a token without partner") : make("p", { className: "note", textContent: "The models have different blocks, so there is no difference block by block." })))];
  }

  function streams({ stacks }) {
    return stacks.flatMap(({ stack, rows, axes, norms, difference: distances }) => {
      const largest = Math.max(...norms.flat(2)), className = axes[0].tokens.length > 16 ? "tiny" : "small", heads = rows.map((path) => ({ label: short(path), title: path }));
      const grid = (axis, values, caption, most) => heatGrid({ caption, corner: "block ↓ token →", signed: false, largest: most, className, rows: heads, columns: columnsOf(axis), values: values.map((row) => row.map((value) => value ?? undefined)) });
      return [...(stack ? [make("h2", { className: "where", textContent: `${stack[0].toUpperCase()}${stack.slice(1)}` })] : []), pictures(rows.length > 12, part(`First: ${subject.model.name}`, grid(axes[0], norms[0], "norm of the residual stream", largest)), part(`Second: ${model2.name}`, grid(axes[1], norms[1], "norm of the residual stream", largest)),
        part("Difference: 1 − cosine", grid(axes[0], distances, "0: same direction; empty: a token without partner", Math.max(0.1, ...distances.flat().filter((value) => value !== null)))))];
    });
  }

  // The causal maps are computed a few layers at a time, from the last one.
  function showAblations(done, fail) {
    const { rows, columns } = rowsOf(subject.model), paths = model2.layers.map(({ path }) => path), common = rows.filter(({ path }) => paths.includes(path)), results = new Map();
    if (!common.length) return stage.fail("the two models have no attention layer of the same name");
    const pending = common.map(({ path }) => path).reverse(), size = Math.max(subject.model.parameters, model2.parameters) > 5e7 ? 1 : 4;
    const show = (targets) => {
      const nHeads = columns.length - 3, cellsOf = (name) => common.map(({ path }) => { const cells = results.get(path)?.[name], n = cells ? cells.length - 3 : 0; return columns.map((_, j) => (cells ? (j < nHeads ? (j < n ? cells[j] : undefined) : cells[n + j - nHeads]) : null)).map((value, j) => (value === null && cells ? undefined : value)); });
      const largest = Math.max(0.05, ...["first", "second"].flatMap((name) => cellsOf(name).flatMap((row) => row.slice(0, nHeads))).map((value) => Math.abs(value ?? 0)));
      const grid = (name, caption) => heatGrid({ caption, corner: "layer ↓ head →", largest, className: common.length > 16 ? "map-grid deep" : "map-grid small", rows: common.map(({ label, path }) => ({ label, title: path })), columns, values: cellsOf(name) });
      const title = (model, name, target) => `${name}: ${model.name}, logit of “${shown(target)}”`;
      stage.show(make("p", { className: "note", textContent: `Change of the logit of the selected output token when a part is set to zero${pending.length ? ` (${common.length - pending.length} of ${common.length} layers computed …)` : ""}. Orange parts speak for the token.` }),
        pictures(common.length > 16, part(title(subject.model, "First", targets[0]), grid("first", "change of the logit")), part(title(model2, "Second", targets[1]), grid("second", "change of the logit")), part(difference, grid("difference", "blue: the part speaks less for the token in the second run"))));
    };
    const pair = inputs(), steps = { first_step: step(subject.last), second_step: pair.second.ids === subject.last.ids ? step(subject.last) : step(second) };
    requests.run(async (stop) => {
      while (pending.length) {
        const layers = pending.splice(0, size), { rows: part_, targets } = await ask("compare_ablations", { ...pair, ...steps, layers }, { signal: stop });
        for (const row of part_) results.set(row.path, row);
        show(targets);
      }
    }, done, fail, 200);
  }

  subject.open();
}
