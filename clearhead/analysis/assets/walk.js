// The page of a walkthrough: a diagram of the model, and one step at a time.

// `data` and `signal` are defined by the surrounding page or ES module.
const { steps, sections, predictions } = data;
const at = (id) => document.getElementById(id);
const state = { step: 0, head: 0, token: null, vector: null }; // vector: the row whose values are all shown
const sectionOf = steps.map((_, i) => sections.findIndex((section) => section.first <= i && i <= section.last));

// Create an element with attributes and children; strings become text nodes.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const trimmed = (token) => token.trim() || token;
const number = (value) => (value === null ? "−∞" : Math.abs(value) >= 1000 || (value && Math.abs(value) < 0.001)
  ? value.toExponential(1) : value.toFixed(Math.abs(value) >= 100 ? 1 : 3)).replace("-", "−");

// ---------------------------------------------------------------------------------------------- colors

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
function mixed(from, to, share) {
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
}
// Return a color map: sequential for weights, diverging for other values.
function scale(role, values) {
  const flat = values.flat(3).filter((value) => value !== null), most = Math.max(1e-9, ...flat.map(Math.abs));
  const [paper, heat, low, ink] = ["--card", "--heat", "--low", "--ink"].map(color);
  if (role === "mask") return (value) => mixed(paper, heat, value ? 0.75 : 0);
  if (role === "weights") { // absolute for few tokens, relative to the maximum for many
    const full = values.length > CELLS ? Math.max(...flat) : 1;
    return (value) => mixed(paper, heat, Math.sqrt(value / full));
  }
  if (role === "pixels") return (value) => mixed("#000000", "#ffffff", value / 255);
  // A few features are often far larger than the rest, so colors saturate at four times the mean magnitude.
  const usual = (4 * flat.reduce((sum, value) => sum + Math.abs(value), 0)) / Math.max(1, flat.length), full = Math.min(most, usual || most);
  return (value) => (value === null ? ink : mixed(paper, value < 0 ? low : heat, Math.min(1, Math.abs(value) / full)));
}
function heatCanvas(rows, paint, width, height, attributes = {}) {
  const canvas = make("canvas", { width: rows[0].length, height: rows.length, ...attributes });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  rows.forEach((row, y) => row.forEach((value, x) => { brush.fillStyle = paint(value); brush.fillRect(x, y, 1, 1); }));
  return canvas;
}

// ---------------------------------------------------------------------------------------------- one step

function article(i, live = true) {
  const step = steps[i], section = sections[sectionOf[i]];
  const sizes = step.symbols.length ? make("p", { class: "shape" }, make("b", {}, `(${step.symbols.join(", ")})`),
    ` = (${step.shape.map((n) => n.toLocaleString("en")).join(", ")})`) : null;
  return make("article", {},
    make("p", { class: "place" }, [section.title, section.order, step.branch].filter(Boolean).join(" · ")),
    make("h2", {}, `${i}. ${step.name}`),
    live ? strip(section) : null,
    live && step.branch.includes("attention") ? attentionFigure(i) : null,
    make("p", { class: "formula" }, step.formula.replace(/, (?=\w\])/g, ",\u00a0")), sizes,
    make("p", { class: "explanation" }, step.explanation),
    step.note ? make("p", { class: "remark" }, step.note) : null,
    sourceLinks(step), step.module ? make("p", { class: "module-path inputs" }, step.module) : null,
    make("div", { class: "values" }, ...values(step)));
}
// The matrices of one head, from Q, K and V to the output, drawn to one scale. A click selects a matrix, whose values are
// then shown below; the row of the followed token is framed.
const FLOW = [["q", "Q"], ["k", "K"], ["scores", "scores"], ["mask", "mask"], ["weights", "softmax"], ["v", "V"], ["heads", "output of the head"]];
const BETWEEN = ["", "·", "=", "+", "→", "·", "="];
function attentionFigure(i) {
  const { module, branch, section } = steps[i], members = new Map();
  steps.forEach((step, j) => { if (step.branch === branch && step.section === section && step.kind !== "words") members.set(step.role, j); });
  const shown = FLOW.filter(([role]) => members.has(role)), at = (role) => headRows(steps[members.get(role)]);
  if (!members.has("weights")) return null;
  const isVector = (role) => ["q", "k", "v", "heads"].includes(role), widthOf = (role) => (isVector(role) ? steps[members.get(role)].shape.at(-1) : at(role)[0].length); // the page contains the first features of long vectors
  const columns = shown.reduce((sum, [role]) => sum + widthOf(role), 0), room = Math.max(300, (document.getElementById("step")?.clientWidth || 900) - 40 * shown.length - 20);
  const widest = Math.max(...shown.map(([role]) => widthOf(role))), tallest = Math.max(...shown.map(([role]) => at(role).length));
  const unit = Math.max(1.5, Math.min(14, 200 / tallest, Math.max(room / columns, Math.min(7, room / widest / 2.3))));
  const parts = shown.flatMap(([role, title], k) => {
    const j = members.get(role), rows = at(role), button = make("button", { type: "button", class: "part", "aria-pressed": String(j === state.step), onclick: () => go({ step: j }) },
      framed(heatCanvas(rows, scale(role, rows), unit * rows[0].length, unit * rows.length), steps[j], rows, unit, role, widthOf(role)), make("b", {}, title), make("small", {}, `${rows.length} × ${widthOf(role)}`));
    return [...(k ? [make("span", { class: "operator", "aria-hidden": "true" }, BETWEEN[FLOW.findIndex(([name]) => name === role)])] : []), button];
  });
  const count = steps[members.get("weights")].values.length;
  const pick = make("div", { class: "choices", role: "group", "aria-label": "Head" }, ...Array.from({ length: Math.min(count, 32) }, (_, head) => make("button", { type: "button", "aria-pressed": String(head === state.head), onclick: () => go({ head }) }, String(head))));
  const follow = make("button", { type: "button", class: "follow", onclick: () => followToken() }, following ? "❚❚ Stop" : "▶ Follow one token");
  return make("figure", { class: "flow" }, make("div", { class: "flow-bar" }, make("span", { class: "remark" }, "Head "), pick, follow), make("div", { class: "flow-row" }, ...parts), make("figcaption", { class: "remark" }, `All matrices are drawn to one scale${shown.some(([role]) => widthOf(role) > at(role)[0].length) ? ", vectors with their first features" : ""}. Select one to see its values.${state.token === null ? "" : ` The framed row is “${trimmed(steps[members.get("weights")].rows[state.token] ?? "")}”.`}`));
}
// The rows of the selected head.
const headRows = (step) => (step.shape.length > 2 ? step.values[Math.min(state.head, step.values.length - 1)] : step.values);
// Add the value under the pointer as a tooltip, and the frame of the followed token.
function framed(canvas, step, rows, unit, role, width) {
  canvas.addEventListener("pointermove", (event) => {
    const j = Math.floor(event.offsetX / unit), i = Math.floor(event.offsetY / unit), value = rows[i]?.[j];
    if (value !== undefined) canvas.title = `${trimmed(step.rows[i] ?? String(i))}${step.columns.length ? ` → ${trimmed(step.columns[j] ?? "")}` : `, feature ${j}`}: ${role === "mask" ? (value ? "may attend" : "hidden") : number(value)}`;
  });
  const box = make("span", { class: width > rows[0].length ? "framed partial" : "framed" }, canvas);
  box.style.width = `${unit * width + 2}px`; // with the border of the canvas
  if (state.token !== null && !["k", "v"].includes(role) && state.token < rows.length) {
    const frame = make("i", {});
    Object.assign(frame.style, { top: `${unit * state.token - 1}px`, height: `${unit + 2}px` });
    box.append(frame);
  }
  return box;
}
// Move through the steps with one token, until the output; with reduced motion, one step per click.
let following = 0;
function followToken() {
  if (following) { clearInterval(following); following = 0; return go({}); }
  state.token ??= Math.max(0, (steps[state.step].rows.length || 1) - 1);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return go({ step: state.step + 1 });
  following = setInterval(() => {
    if (signal.aborted || state.step >= steps.length - 1) { clearInterval(following); following = 0; if (!signal.aborted) go({}); return; }
    go({ step: state.step + 1 });
  }, 900);
  go({});
}
// The steps of a section as buttons; those of one branch are framed, with its name.
function strip(section) {
  const parts = [];
  for (let i = section.first; i <= section.last; i++) {
    const { branch } = steps[i], button = make("button", { type: "button", "aria-current": i === state.step, onclick: () => go({ step: i }) }, short(steps[i]));
    if (!branch) parts.push(button);
    else if (i > section.first && steps[i - 1].branch === branch) parts[parts.length - 1].append(button);
    else parts.push(make("span", { class: "branch" }, make("small", {}, branch), button));
  }
  return make("div", { class: "strip", role: "group", "aria-label": section.title }, ...parts);
}
const SHORT = { q: "q", k: "k", v: "v", scores: "scores", mask: "mask", weights: "softmax", heads: "heads", out: "output", hidden: "hidden",
  feed_forward: "feed-forward", add: "add", norm: "norm" };
const short = (step) => SHORT[step.role] ?? LABELS[step.role] ?? step.name;
function sourceLinks(step) {
  if (!step.sources.length) return null;
  const links = step.sources.map((i) => make("button", { type: "button", onclick: () => go({ step: i }) }, `${i}. ${steps[i].name}`));
  return make("p", { class: "inputs" }, "computed from ", ...links);
}

function values(step) {
  if (step.kind === "ids") return [chips(step)];
  if (step.kind === "words") return [bars(step)];
  if (step.kind === "image") {
    const side = Math.min(320, innerWidth - 40);
    return [heatCanvas(step.values, scale("pixels", step.values), side, (side * step.values.length) / step.values[0].length, { class: "big" })];
  }
  const deep = step.shape.length > 2, many = deep && step.values.length > 1, head = many ? Math.min(state.head, step.values.length - 1) : 0;
  const rows = deep ? step.values[head] : step.shape.length > 1 ? step.values : [step.values];
  const norms = step.norms && (deep ? step.norms[head] : step.shape.length > 1 ? step.norms : [step.norms]);
  const paint = scale(step.role, rows);
  const title = many ? make("h3", {}, `Head ${head} of ${step.values.length}`) : null;
  const body = step.kind === "maps" ? matrix(step, rows, paint) : vectors(step, rows, norms, paint);
  return [many ? heads(step, head) : null, title, make("div", { class: "scroll" }, body)].filter(Boolean);
}
function heads(step, chosen) {
  const thumbs = step.values.map((rows, h) => make("button", { type: "button", "aria-pressed": h === chosen, "aria-label": `head ${h}`,
    onclick: () => go({ head: h }) },
    heatCanvas(rows, scale(step.role, rows), 44, step.kind === "maps" ? 44 : 22), String(h)));
  return make("div", { class: "heads", role: "group", "aria-label": "Heads" }, ...thumbs);
}
function chips(step) {
  return make("div", { class: "chips" }, ...step.rows.map((token, i) => make("span", {}, token,
    step.role === "characters" ? "" : make("small", {}, String(step.values[i])))));
}
function bars(step) {
  const tables = predictions.map((prediction, i) => make("table", {},
    make("caption", {}, ...(prediction.context.length ? ["after ", make("b", {}, prediction.context.slice(-6).map(trimmed).join(" "))] : ["of the image"])),
    make("tbody", {}, ...prediction.top.map((word) => {
      const gauge = make("span", {});
      gauge.style.width = `${100 * word.probability}%`;
      return make("tr", { class: word.id === prediction.token.id ? "selected" : null }, make("td", {}, trimmed(word.token)),
        make("td", { class: "gauge" }, gauge), make("td", {}, word.probability >= 0.001 ? word.probability.toFixed(3) : "<0.001"));
    }))));
  if (step.role === "softmax") return make("div", { class: "bars" }, ...tables);
  return make("div", { class: "chips" }, ...predictions.map((prediction) => make("span", {}, trimmed(prediction.token.token),
    make("small", {}, `${prediction.token.id}, p = ${prediction.token.probability.toFixed(3)}`))));
}
function vectors(step, rows, norms, paint) {
  const narrow = innerWidth < 600, title = "Select a row to see all of its values", first = Math.min(narrow ? 2 : 5, rows[0].length), width = Math.min(narrow ? 110 : 260, 4 * rows[0].length);
  const rest = step.shape[step.shape.length - 1];
  const head = make("tr", {}, make("th"), make("th", { title }, `${rows[0].length < rest ? `${rows[0].length} of ` : ""}${rest.toLocaleString("en")}`),
    ...Array.from({ length: first }, (_, j) => make("th", {}, String(j))), make("th", {}, "norm"));
  const isOpen = (i) => state.vector === i && rows[0].length > first;
  return make("table", { class: "rows" }, make("thead", {}, head), make("tbody", {}, ...rows.flatMap((row, i) => [make("tr", {},
    rowHeading(step, i, trimmed(step.rows[i] ?? "")), make("td", {}, make("button", { type: "button", class: "vector-open", "aria-expanded": isOpen(i), "aria-label": `All values of ${trimmed(step.rows[i] ?? String(i))}`, title: isOpen(i) ? "Hide the values" : "Show all values",
      onclick: () => go({ vector: isOpen(i) ? null : i }) }, heatCanvas([row], paint, width, 14))),
    ...row.slice(0, first).map((value) => make("td", { class: "n" }, number(value))),
    make("td", { class: "n" }, number(norms[i]))), isOpen(i) ? make("tr", {}, make("td", { colspan: first + 3 }, wholeVector(row, rest, paint))) : null]).filter(Boolean)));
}
// The values of one vector as cells, from left to right.
function wholeVector(row, length, paint) {
  const cells = row.map((value, j) => shaded(make("span", { title: `feature ${j}` }, number(value)), paint(value)));
  return make("div", { class: "whole-vector" }, ...cells, row.length < length ? make("p", { class: "remark" }, `The page contains the first ${row.length} of ${length.toLocaleString("en")} values.`) : null);
}
// Give a cell a background and readable text.
function shaded(cell, background) {
  cell.style.backgroundColor = background;
  const [r, g, b] = cell.style.backgroundColor.match(/\d+/g).map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  cell.style.color = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff"; // the one with the greater contrast
  return cell;
}
const CELLS = 12; // maximum number of rows and columns with values in the cells
function matrix(step, rows, paint) {
  if (Math.max(rows.length, rows[0].length) > CELLS) {
    const side = Math.min(480, innerWidth - 60 - LABEL_SIZE), high = Math.min(640, Math.max(40, (side * rows.length) / rows[0].length));
    return make("figure", { class: "labeled-map" }, make("span", { class: "corner" }, "query ↓ key →"), ticks(step.columns, side, "top"), ticks(step.rows, high, "left"), heatCanvas(rows, paint, side, high, { class: "big" }),
      make("figcaption", { class: "remark" }, rowMeaning(step) + (step.pooled ? " A cell is a mean." : "")));
  }
  const cell = (value) => shaded(make("td", {}, step.role === "mask" ? (value ? "True" : "False") : value === null ? "−∞" : value.toFixed(2).replace("-", "−")), paint(value));
  const head = make("tr", {}, make("th", {}, "query ↓ key →"), ...step.columns.map((name) => make("th", { scope: "col" }, trimmed(name))));
  const table = make("table", { class: "grid" }, make("thead", {}, head), make("tbody", {}, ...rows.map((row, i) =>
    make("tr", {}, rowHeading(step, i, trimmed(step.rows[i])), ...row.map(cell)))));
  return make("figure", { class: "map-table" }, table, make("figcaption", { class: "remark" }, rowMeaning(step)));
}
// What a row of a matrix is; a decoder reads a token and predicts the next one.
function rowMeaning(step) {
  if (steps[0].kind === "image") return "A row is a query, labeled by its patch; a column is a key.";
  const predicts = step.symbols.includes("T") && predictions.some((prediction) => prediction.context.length);
  return `A row is a query, labeled by the token read${predicts ? ", not by the token predicted next" : ""}; a column is a key.`;
}
const LABEL_SIZE = 84; // pixels of the labels of a large matrix
// Labels of every n-th row or column of a large matrix.
function ticks(names, pixels, side) {
  const stride = Math.ceil((13 * names.length) / pixels), box = make("div", { class: `ticks ${side}`, "aria-hidden": "true" });
  box.style[side === "top" ? "width" : "height"] = `${pixels}px`;
  names.forEach((name, i) => {
    if (i % stride) return;
    const tick = make("span", {}, trimmed(name));
    tick.style[side === "top" ? "left" : "top"] = `${(100 * (i + 0.5)) / names.length}%`;
    box.append(tick);
  });
  return box;
}
// The heading of a token's row; a surrounding page highlights the token by its name, "s3" or "t5".
function rowHeading(step, i, text) {
  const axis = step.symbols.find((symbol) => symbol === "S" || symbol === "T");
  const cell = make("th", { scope: "row" }, text);
  if (axis) cell.dataset.token = `${axis.toLowerCase()}${i}`;
  return cell;
}

// ---------------------------------------------------------------------------------------------- moving

function go(changes, push = true) {
  Object.assign(state, changes);
  state.step = Math.max(0, Math.min(steps.length - 1, state.step));
  state.head = Math.max(0, Math.min((data.sizes.H ?? 1) - 1, state.head));
  const focused = document.activeElement?.closest("#drawing") !== null && document.activeElement !== document.body;
  drawing();
  if (focused) at("drawing").querySelector(".here")?.focus();
  const before = steps[state.step - 1], after = steps[state.step + 1];
  at("step").replaceChildren(article(state.step), make("div", { class: "turn" },
    make("button", { type: "button", disabled: !before, onclick: () => go({ step: state.step - 1 }) }, `← ${before ? short(before) : ""}`),
    make("button", { type: "button", class: "next", disabled: !after, onclick: () => go({ step: state.step + 1 }) }, `${after ? short(after) : ""} →`)));
  document.documentElement.dataset.ready = `${state.step}/${state.head}`;
  try { if (push) history.replaceState(null, "", `#${state.step}.${state.head}`); } catch { /* an iframe without a URL */ }
}
// The same step in the previous or next block.
function jump(by) {
  const section = sections[sectionOf[state.step]];
  const other = sections.find((candidate) => candidate.block === (section.block ?? -2) + by && section.block !== null && stackOf(candidate) === stackOf(section))
    ?? sections[sectionOf[state.step] + by];
  if (other) go({ step: Math.min(other.first + (section.block === null || other.block === null ? 0 : state.step - section.first), other.last) });
}
const KEYS = { ArrowLeft: () => go({ step: state.step - 1 }), ArrowRight: () => go({ step: state.step + 1 }),
  ArrowUp: () => jump(-1), ArrowDown: () => jump(1), "[": () => go({ head: state.head - 1 }), "]": () => go({ head: state.head + 1 }),
  Home: () => go({ step: 0 }), End: () => go({ step: steps.length - 1 }), "?": () => at("help").showModal() };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || at("help").open || !KEYS[event.key]) return;
  if (event.target.closest?.("input, textarea, select")) return; // typing in a field
  event.preventDefault();
  KEYS[event.key]();
}, { signal });
at("help-open").addEventListener("click", () => at("help").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => go({}), { signal });
addEventListener("hashchange", () => { restore(); go({}, false); }, { signal });
// On paper: the diagram, then input, selected blocks and output, step by step.
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  const open = openBlocks();
  const printed = sections.filter((section) => section.block === null || open.has(section.path));
  at("paper").replaceChildren(...printed.flatMap((section) => steps.slice(section.first, section.last + 1).map((_, k) => article(section.first + k, false))));
}, { signal });
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  at("paper").replaceChildren();
}, { signal });

function restore() {
  const match = location.hash.match(/^#(\d+)\.(\d+)$/);
  if (match) Object.assign(state, { step: Number(match[1]), head: Number(match[2]) });
}
const fillList = (target, pairs) => at(target).append(...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
at("title").textContent = data.title;
at("save-svg")?.addEventListener("click", saveDrawing, { signal });
at("save-pdf")?.addEventListener("click", () => {
  document.documentElement.classList.add("drawing-only");
  addEventListener("afterprint", () => document.documentElement.classList.remove("drawing-only"), { once: true });
  print();
}, { signal });
fillList("facts", Object.entries(data.metadata));
fillList("sizes", Object.entries(data.sizes).map(([letter, size]) => [letter, `${size.toLocaleString("en")} ${data.symbols[letter] ?? ""}`]));
// Open on the attention weights: of the first cross-attention layer, or else of the first layer.
const maps = steps.map((_, i) => i).filter((i) => steps[i].role === "weights");
state.step = maps.find((i) => steps[i].branch === "cross-attention") ?? maps[0] ?? 0;
restore();
go({}, false);
const api = { go, state };
