// Training: a slider over the checkpoints of a run. Every frame shows what the model of a checkpoint computes for the same
// tokens: its attention, its logit lens and what it writes, beside the loss curve. The run may still be training.
import { diffLine } from "./diff.js";
import { heatGrid } from "./heat.js";
import { saveButton } from "./save.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, button, count, draw, make, pane, readState, ready, saveButtons } from "./tools.js";

// at: the step of the shown checkpoint ("": the newest); map: path and head of the enlarged map.
const DEFAULTS = { ...SUBJECT, at: "", map: "" };
const POLL_MS = 4000, FRAME_MS = 450, MAX_FRAMES = 400;
const EMPTY = "This page has no training run. Train with many checkpoints, in one terminal: clearhead train sort-dedup --out runs/letters --set checkpoint_every=40 --set keep=100. Start this page in another, also while it is training: clearhead explore runs/letters";
const short = (path) => path.replace(/(^|\.)blocks\./, "$1").replace(/\.attention$/, " self").replace(".cross_attention", " cross");
const shown = (text) => text.trim() || text;

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: [...SAMPLING, "at"] }), stage = pane("training"), save = () => remember(state, DEFAULTS), requests = new Latest(signal), polls = new Latest(signal);
  const frames = new Map(); // by step
  let log = null, playing = 0, polling = 0, sharpest = null, reference = null; // reference: the checkpoint that wrote the tokens
  const range = make("input", { type: "range", min: 0, max: 0, value: 0, ariaLabel: "Checkpoint", on: { input() { pause(); select(log.steps[range.value]); } } });
  const play = button("▶ Play", () => (playing ? pause() : start())), where = make("output", { className: "where" });
  const bar = make("div", { className: "bar stage-bar film-bar" }, play, make("span", { className: "note", textContent: "Checkpoint" }), range, where, saveButton("training"));
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0 && model.checkpoints.length > 0 && !model.run, onModel: () => { frames.clear(); log = sharpest = null; },
    onRun, onFail: (error) => stage.fail(error.message), onLoading: () => stage.loading(), onNone: () => { box.replaceChildren(make("h1", { textContent: "Training" }), stage); stage.empty(EMPTY); ready("training empty"); } });
  modelLayout(box, subject, bar, stage);
  signal.addEventListener("abort", () => { pause(); clearTimeout(polling); });

  function onRun() {
    frames.clear();
    reference = null;
    readLog();
  }

  // Read the log, and let the newest checkpoint write again. Its tokens are the input of all frames.
  async function readNewest(stop) {
    const { name } = subject.model, arrived = await ask("training_log", { model: name }, { signal: stop }), newest = arrived.steps.at(-1);
    return { arrived, newest, run: newest === reference ? subject.last : await ask("run", subject.runRequest(`${name}@${newest}`), { signal: stop }) };
  }

  function readLog() {
    clearTimeout(polling);
    polls.run(readNewest, ({ arrived, newest, run }) => {
      if (String(run.ids) !== String(subject.last.ids)) frames.clear();
      subject.last = { ...run, model: subject.model.name };
      reference = newest;
      const follows = state.at === "" || !log;
      log = { ...arrived, steps: [...new Set([...frames.keys(), ...arrived.steps])].sort((a, b) => a - b) };
      range.max = log.steps.length - 1;
      select(follows && state.at === "" ? log.steps.at(-1) : nearest(Number(state.at)), state.at !== "");
      if (!log.is_finished) polling = setTimeout(readLog, POLL_MS);
    }, (error) => stage.fail(error.message));
  }

  const nearest = (step) => log.steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best), log.steps[0]);

  // Show a checkpoint; without `keeps`, the newest one is not part of the address, so that the page follows the run.
  function select(step, keeps = false) {
    state.at = !keeps && step === log.steps.at(-1) ? "" : String(step);
    save();
    range.value = log.steps.indexOf(step);
    range.setAttribute("aria-valuetext", `step ${step}`);
    where.textContent = `step ${count(step)}${log.is_finished ? "" : " · still training; new checkpoints appear here"}`;
    if (frames.has(step)) return show(step);
    if (!stage.content.childElementCount) stage.loading();
    const temperature = subject.setting("t", "temperature");
    requests.run((stop) => ask("training_frame", { ...subject.input, model: `${subject.model.name}@${step}`, temperature, seed: Number(state.seed), max_new_tokens: Number(state.n) }, { signal: stop }), (frame) => {
      if (frames.size >= MAX_FRAMES) frames.delete(frames.keys().next().value);
      frames.set(step, frame);
      show(step);
    }, (error) => { pause(); stage.fail(error.message); ready("error"); });
  }

  function start() {
    if (!log || log.steps.length < 2) return;
    play.textContent = "❚❚ Pause";
    let i = Number(range.value) >= log.steps.length - 1 ? 0 : Number(range.value);
    select(log.steps[i], true);
    const tick = () => {
      if (!frames.has(log.steps[i])) return void (playing = setTimeout(tick, 60)); // not arrived yet
      if (++i >= log.steps.length) return pause();
      select(log.steps[i], true);
      playing = setTimeout(tick, FRAME_MS);
    };
    playing = setTimeout(tick, FRAME_MS);
  }

  function pause() { clearTimeout(playing); playing = 0; play.textContent = "▶ Play"; }

  function show(step) {
    const frame = frames.get(step), [path, head] = (state.map || (sharpest ??= sharpestHead(frame.maps))).split(":");
    const map = frame.maps.find((candidate) => candidate.path === path) ?? frame.maps[0], chosen = Number(head) < map.n_heads && /^\d+$/.test(head) ? Number(head) : 0;
    const newest = subject.last.text;
    stage.show(make("p", { className: "answer-output film-output" }, make("small", { textContent: `${step === 0 ? "Before training" : `After step ${count(step)}`} the model writes${frame.writes === newest ? "" : ", compared with the newest checkpoint"} ` }), frame.writes === newest ? make("span", { textContent: frame.writes || "nothing" }) : diffLine(newest, frame.writes)),
      make("div", { className: "film" }, make("section", {}, make("h3", { textContent: "Loss" }), lossCurve(step, frame), thumbs(frame.maps, map, chosen)),
        make("section", {}, make("h3", { textContent: `Attention: block ${short(map.path).replace(" self", ", self-attention").replace(" cross", ", cross-attention")}, head ${chosen}` }), large(map, chosen))),
      make("section", {}, make("h3", { textContent: "Logit lens: the most probable next token after every block" }), lens(frame.lens)));
    document.documentElement.dataset.shown = `training ${step}`;
    ready(`training ${step}`);
  }

  // The head that is enlarged at first: the one with the largest mean of the largest weight of a row.
  function sharpestHead(maps) {
    const scores = maps.flatMap((map) => Array.from({ length: map.n_heads }, (_, head) => {
      const [rows, columns] = map.size, bytes = bytesOf(map), peaks = Array.from({ length: rows }, (__, i) => Math.max(...bytes.subarray((head * rows + i) * columns, (head * rows + i + 1) * columns)));
      return [peaks.slice(map.path.endsWith("cross_attention") ? 0 : Math.floor(rows / 2)).reduce((sum, peak) => sum + peak, 0) / rows, `${map.path}:${head}`];
    }));
    return scores.reduce((best, score) => (score[0] > best[0] ? score : best))[1];
  }

  function bytesOf(map) {
    map.bytes ??= Uint8Array.from(atob(map.codes), (character) => character.charCodeAt(0));
    return map.bytes;
  }

  // A small picture of every head; a click enlarges it.
  function thumbs(maps, selected, head) {
    const style = getComputedStyle(document.documentElement), [from, to] = ["--card", "--heat"].map((name) => [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16)));
    const picture = (map, h) => {
      const [rows, columns] = map.size, canvas = make("canvas", { width: columns, height: rows }), pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows), bytes = bytesOf(map);
      for (let i = 0; i < rows * columns; i++) for (let c = 0; c < 4; c++) image.data[4 * i + c] = c === 3 ? 255 : from[c] + (to[c] - from[c]) * (bytes[h * rows * columns + i] / 255);
      pen.putImageData(image, 0, 0);
      return canvas;
    };
    const isPressed = (map, h) => String(map === selected && h === head);
    return make("div", { className: "film-heads" }, make("h3", { textContent: "All heads" }), make("div", { className: "film-row numbers", ariaHidden: true }, make("span", { className: "code", textContent: "layer ↓ head →" }), ...Array.from({ length: Math.max(...maps.map((map) => map.n_heads)) }, (_, h) => make("small", { textContent: h }))), ...maps.map((map) => make("div", { className: "film-row" }, make("span", { className: "code", textContent: short(map.path) }),
      ...Array.from({ length: map.n_heads }, (_, h) => make("button", { type: "button", className: "film-head", ariaPressed: isPressed(map, h), ariaLabel: `${map.path}, head ${h}`, title: `${map.path}, head ${h}`, on: { click() { state.map = `${map.path}:${h}`; save(); show(log.steps[range.value]); } } }, picture(map, h))))));
  }

  function large(map, head) {
    const [rows, columns] = map.size, bytes = bytesOf(map), isPooled = rows < map.rows.tokens.length || columns < map.columns.tokens.length;
    const labels = (axis, n) => Array.from({ length: n }, (_, i) => { const k = Math.floor((i * axis.tokens.length) / n); return { label: shown(axis.tokens[k]), token: `${axis.stack}${axis.positions[k]}` }; });
    return heatGrid({ caption: `attention weight${isPooled ? "; a cell is the largest weight of its part" : ""}. ${map.path.endsWith("cross_attention") ? "A row is the token about to be written." : "A row is the token that attends."}`, corner: "query ↓ key →", signed: false, largest: 1, className: Math.max(rows, columns) > 16 ? "tiny" : "small",
      rows: labels(map.rows, rows), columns: labels(map.columns, columns), values: Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => (bytes[(head * rows + i) * columns + j] / 255) ** 2)) });
  }

  function lens({ rows, tokens, positions, texts, probabilities }) {
    const order = rows.map((_, i) => rows.length - 1 - i);
    return heatGrid({ caption: "its probability", corner: "after ↓ token read →", signed: false, largest: 1, rows: order.map((i) => ({ label: rows[i].includes("blocks.") ? `block ${short(rows[i])}` : short(rows[i]), title: rows[i] })), columns: tokens.map((label, j) => ({ label: shown(label), token: `t${positions[j]}` })), values: order.map((i) => probabilities[i]), texts: order.map((i) => texts[i].map(shown)) });
  }

  // Training and validation loss on a logarithmic axis; a dot per checkpoint selects it.
  function lossCurve(step, frame) {
    const W = 420, H = 210, left = 46, bottom = 30, { train, valid, steps } = log, positive = [...train, ...valid].map(([, loss]) => loss).filter((loss) => loss > 0), all = positive.length ? positive : [1];
    const margin = 0.03, low = Math.log10(Math.min(...all)) - margin, high = Math.log10(Math.max(...all)) + margin, last = Math.max(steps.at(-1), ...train.map(([at]) => at), 1);
    const x = (at) => left + (at / last) * (W - left - 10), y = (loss) => 8 + ((high - Math.log10(Math.max(loss, 10 ** low))) / (high - low || 1)) * (H - bottom - 14);
    const line = (points, name) => draw("path", { class: name, d: points.map(([at, loss], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(loss).toFixed(1)}`).join("") });
    const near = (at) => valid.concat(train).reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best), [Infinity, 1]);
    const svg = draw("svg", { class: "curve loss", viewBox: `0 0 ${W} ${H}`, role: "img" }, draw("title", {}, "Training and validation loss by step; the selected checkpoint is marked"));
    for (const loss of lossTicks(10 ** low, 10 ** high)) svg.append(draw("path", { class: "tick", d: `M${left} ${y(loss)}H${W - 10}` }), draw("text", { x: left - 6, y: y(loss) + 4, "text-anchor": "end" }, loss < 0.001 ? loss.toExponential() : loss));
    svg.append(draw("path", { class: "axis", d: `M${left} 8V${H - bottom}H${W - 10}` }), draw("text", { x: left, y: H - 14, "text-anchor": "middle" }, "0"), draw("text", { x: W - 10, y: H - 14, "text-anchor": "end" }, count(last)), draw("text", { x: (W + left) / 2, y: H - 4, "text-anchor": "middle" }, "step"),
      line(train, "line train"), line(valid, "line valid"), draw("path", { class: "now", d: `M${x(step)} 8V${H - bottom}` }));
    for (const at of steps) svg.append(draw("circle", { class: at === step ? "dot times" : "dot", cx: x(at), cy: y(near(at)[1]), r: at === step ? 5 : 3, on: { click: () => { pause(); select(at, true); } } }, draw("title", {}, `checkpoint of step ${at}`)));
    const legend = make("p", { className: "note loss-legend" }, make("i", { className: "train" }), "training ", make("i", { className: "valid" }), `validation, in nats per token on a logarithmic axis.${frame.loss === null ? "" : ` On the tokens of this text: ${frame.loss.toPrecision(3)}.`} `, saveButtons("loss", svg));
    return make("figure", {}, svg, legend);
  }

  subject.open();
}

// Round values between two losses: 1, 2 and 5 times powers of ten; powers of ten if these are too many, tenths if too few.
function lossTicks(low, high) {
  const ticks = [], digits = high > 1000 * low ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const digit of digits) ticks.push(Number((digit * 10 ** power).toPrecision(1)));
  const inside = ticks.filter((tick) => low <= tick && tick <= high);
  if (inside.length > 1) return inside;
  const size = 10 ** Math.floor(Math.log10(high - low)), step = [1, 0.5, 0.2, 0.1].map((share) => share * size).find((candidate) => Math.floor(high / candidate) - Math.ceil(low / candidate) >= 2) ?? size / 10, first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(3)));
}
