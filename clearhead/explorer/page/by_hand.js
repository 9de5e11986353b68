// Attention by hand: a few vectors in the plane, dragged or typed; scores, weights and outputs in exact numbers.
import { Latest, ask, choices, draw, field, make, readState, ready, routeError, saveButtons } from "./tools.js";

const DEFAULTS = { x: "1,0;0,1;1/2,1/2;-1/2,1", order: "", beta: "1", mask: "full()", key: 0, noise: "0,0", scale: "1" };
const KINDS = {
  soft: { beta: "1", mask: "full()", order: "" },
  hard: { beta: "inf", mask: "full()", order: "" },
  uniform: { beta: "0", mask: "full()", order: "" },
  identity: { beta: "inf", mask: "window(0, 0)", order: "" },
  permutation: { beta: "inf", mask: "full()", order: "next", x: "1,0;0,1;-1,0;0,-1" },
  convolution: { beta: "0", mask: "window(1, 1)", order: "" },
};
const SIDE = 320, RANGE = 2; // the plane shows −2 … 2

const parse = (text) => text.split(";").map((pair) => pair.split(",").map((cell) => cell.trim()));
const value = (cell) => { const [numerator, denominator = 1] = cell.replace("−", "-").split("/"); return Number(numerator) / Number(denominator); };

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial), latest = new Latest(signal);
  const plane = draw("svg", { class: "plane", viewBox: `0 0 ${SIDE} ${SIDE}`, role: "group" });
  plane.setAttribute("aria-label", "The vectors in the plane; arrow keys move the focused vector");
  const rows = make("div", { className: "vectors" }), errorBox = make("p", { className: "caret", role: "alert" }), kind = make("p", { className: "kind" });
  const out = make("div", { className: "matrices" });
  const input = (label, name, more = {}) => field(label, make("input", { type: "text", value: state[name], className: "code typed", spellcheck: false, ...more, on: { input(event) { go({ [name]: event.target.value }); } } }));
  const beta = input("β (0, 2, 3/2, inf)", "beta"), mask = input("Mask", "mask", { className: "code" });
  const scale = input("Scale of that key", "scale"), noise = input("Noise on that key (x, y)", "noise");
  const key = field("Perturbed key", make("select", { on: { change(event) { go({ key: Number(event.target.value) }); } } }));
  const order = field("Queries", make("select", { on: { change(event) { go({ order: event.target.value }); } } },
    ...[["", "the vectors in order"], ["next", "shifted by one"], ["back", "in reverse order"]].map(([name, label]) => make("option", { value: name, textContent: label }))));
  const betaSlider = make("input", { type: "range", min: -3, max: 3, step: 0.25, value: Math.log2(Number(state.beta)) || 0, ariaLabel: "β as a slider, from 1/8 to 8",
    on: { input() { go({ beta: String(Math.round(1000 * 2 ** betaSlider.value) / 1000) }); } } });
  beta.append(betaSlider);
  const kinds = choices("Examples of attention", Object.keys(KINDS), "", (name) => go({ ...DEFAULTS, key: state.key, x: state.x, ...KINDS[name] }));
  box.append(make("h1", { textContent: "Attention by hand" }),
    make("p", { className: "lead", textContent: "The outputs softmax(β·Q·Kᵀ)·X in exact numbers. Queries Q and keys K are the vectors X themselves, or a variation of them. Drag a point, or type fractions." }),
    make("div", { className: "bar start" }, make("span", { className: "note", textContent: "Examples" }), kinds),
    make("div", { className: "form top-gap" }, beta, mask, order, key, scale, noise),
    errorBox,
    make("div", { className: "byhand" }, make("figure", {}, plane, make("figcaption", {}, "Vectors (points) and outputs (rings) ", saveButtons("vectors", plane)), rows), make("div", {}, kind, out)));

  const fields = { beta, mask, scale, noise };
  const vectors = () => parse(state.x);
  const orders = (n) => ({ next: [...Array(n).keys()].map((i) => (i + 1) % n), back: [...Array(n).keys()].reverse() }[state.order] ?? []);
  const toPixels = (x, y) => [SIDE / 2 + (x * SIDE) / 2 / RANGE, SIDE / 2 - (y * SIDE) / 2 / RANGE];

  function go(changes) {
    Object.assign(state, changes);
    const all = vectors();
    state.key = Math.min(state.key, all.length - 1);
    for (const [boxed, name] of [[beta, "beta"], [mask, "mask"], [scale, "scale"], [noise, "noise"]]) {
      const element = boxed.querySelector("input");
      if (element.value !== state[name] && element !== document.activeElement) element.value = state[name];
    }
    order.querySelector("select").value = state.order;
    key.querySelector("select").replaceChildren(...all.map((_, i) => make("option", { value: i, textContent: `x${i + 1}`, selected: i === state.key })));
    remember(state, DEFAULTS);
    showList(all);
    showPlane(all, null);
    latest.run((stop) => ask("attention_by_hand", {
      vectors: all, order: orders(all.length), beta: state.beta, mask: state.mask, perturbed_key: state.key, noise: parse(state.noise)[0], scale: state.scale,
    }, { signal: stop }), (result) => show(all, result), (error) => { routeError(error, fields, (message) => { errorBox.textContent = message; }); out.classList.add("old"); ready("error"); });
  }

  const set = (i, pair) => { const all = vectors(); all[i] = pair; go({ x: all.map((cells) => cells.join(",")).join(";") }); };

  function showList(all) {
    if (rows.contains(document.activeElement) && rows.children.length === all.length + 2) return; // do not replace a field while the user types
    rows.replaceChildren(make("div", { className: "vector headings", ariaHidden: true }, make("b"), make("small", { textContent: "1st number" }), make("small", { textContent: "2nd number" })), ...all.map((pair, i) => make("div", { className: "vector" }, make("b", { textContent: `x${i + 1}` }),
      ...pair.map((cell, j) => make("input", { type: "text", value: cell, className: "code cell", ariaLabel: `x${i + 1}, ${j ? "second" : "first"} number`, on: {
        input(event) { const changed = vectors(); changed[i][j] = event.target.value; go({ x: changed.map((cells) => cells.join(",")).join(";") }); } } })),
      all.length > 3 ? make("button", { type: "button", textContent: "×", title: `Remove x${i + 1}`, ariaLabel: `Remove x${i + 1}`, on: { click() {
        go({ x: vectors().filter((_, k) => k !== i).map((cells) => cells.join(",")).join(";") }); } } }) : null)),
      make("div", {}, all.length < 6 ? make("button", { type: "button", className: "act", textContent: "Add a vector", on: { click() { go({ x: `${state.x};1/2,-1/2` }); } } }) : ""));
  }

  function showPlane(all, result) {
    const focused = plane.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    const [cx, cy] = toPixels(0, 0), ends = all.map((pair) => toPixels(...pair.map(value)));
    plane.replaceChildren(draw("rect", { class: "paper", width: SIDE, height: SIDE }),
      ...[-1, 1].flatMap((unit) => { const [x, y] = toPixels(unit, unit); return [draw("path", { class: "grid", d: `M${x} 0V${SIDE}M0 ${y}H${SIDE}` })]; }),
      draw("path", { class: "axis", d: `M${cx} 0V${SIDE}M0 ${cy}H${SIDE}` }),
      ...[-1, 1].flatMap((unit) => { const [x, y] = toPixels(unit, unit), label = String(unit).replace("-", "−"); return [draw("text", { class: "tick", x, y: cy + 21, "text-anchor": "middle" }, label), draw("text", { class: "tick", x: cx - 13, y: y + 4, "text-anchor": "end" }, label)]; }),
      draw("text", { class: "tick", x: SIDE - 5, y: cy + 14, "text-anchor": "end" }, "1st number"), draw("text", { class: "tick", x: cx + 6, y: 13 }, "2nd number"),
      ...ends.flatMap(([x, y], i) => (Number.isFinite(x + y) ? [draw("line", { class: "arrow", x1: cx, y1: cy, x2: x, y2: y })] : [])),
      ...(result ? result.outputs.values.map(([x, y], i) => { const [a, b] = toPixels(x, y); return draw("circle", { class: "output", cx: a, cy: b, r: 6 }, draw("title", {}, `output ${i + 1}`)); }) : []),
      ...ends.flatMap(([x, y], i) => {
        if (!Number.isFinite(x + y)) return [];
        const tip = draw("circle", { class: "tip-of", cx: x, cy: y, r: 9, tabindex: 0, role: "button", "aria-label": `x${i + 1} at ${all[i].join(", ")}` });
        tip.dataset.at = i;
        return [tip, draw("text", { x: x + 12, y: y - 8 }, `x${i + 1}`)];
      }));
    if (focused !== null) plane.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  // Tips are dragged in steps of 1/8, so that the numbers stay short.
  let dragged = null;
  const eighths = (number) => { let numerator = Math.round(8 * Math.max(-RANGE, Math.min(RANGE, number))), denominator = 8; while (denominator > 1 && numerator % 2 === 0) { numerator /= 2; denominator /= 2; } return denominator === 1 ? String(numerator) : `${numerator}/${denominator}`; };
  plane.addEventListener("pointerdown", (event) => { if (event.target.dataset.at !== undefined) { dragged = Number(event.target.dataset.at); plane.setPointerCapture(event.pointerId); } });
  plane.addEventListener("pointermove", (event) => {
    if (dragged === null) return;
    const frame = plane.getBoundingClientRect(), unit = (2 * RANGE) / frame.width;
    set(dragged, [eighths((event.clientX - frame.left) * unit - RANGE), eighths(RANGE - (event.clientY - frame.top) * unit)]);
  });
  for (const end of ["pointerup", "pointercancel"]) plane.addEventListener(end, () => { dragged = null; });
  plane.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key], i = event.target.dataset.at;
    if (!step || i === undefined) return;
    event.preventDefault();
    set(Number(i), vectors()[i].map((cell, j) => eighths(value(cell) + step[j] / 8)));
  });

  function show(all, result) {
    errorBox.textContent = "";
    for (const boxed of Object.values(fields)) boxed.problem("");
    out.classList.remove("old");
    showPlane(all, result);
    const [name, description] = result.kind.split(": ");
    kinds.set(name);
    kind.replaceChildren(make("b", { textContent: name }), description ? `: ${description}.` : ".", result.max_weight_change > 0 ? ` The perturbation changes a weight by up to ${result.max_weight_change.toPrecision(3)}.` : "");
    const n = all.length, labels = [...Array(n).keys()].map((i) => `x${i + 1}`), order = orders(n), queries = labels.map((_, i) => `q${i + 1}${order.length ? ` = x${order[i] + 1}` : ""}`);
    const { row_sums: rowSums } = result, keys = labels.map((_, i) => `k${i + 1}`);
    out.replaceChildren(
      matrix("Scores Q·Kᵀ", result.scores, queries, keys, result.allowed),
      matrix("Weights", result.weights, queries, keys, result.allowed, true, Boolean(rowSums)),
      rowSums ? matrix("Z: divisor of each row", rowSums, queries.map((_, i) => `Z${subscript(i)}`), [""]) : "",
      matrix("Outputs: weights · X", result.outputs, queries, ["1st", "2nd"], null, false, Boolean(rowSums)));
    ready(`by_hand ${state.x} ${state.beta} ${name}`);
  }

  go({});
}

const subscript = (i) => "₁₂₃₄₅₆"[i];

// Format a number divided by the sum of its row.
const quotient = (text, i) => (!text || text === "0" ? text : `${/ [+−] /.test(text) ? `(${text})` : text}/Z${subscript(i)}`);

// Create a table of exact numbers with their decimals below; weights are shaded by their size.
function matrix(title, cells, rows, columns, allowed = null, isShaded = false, isQuotient = false) {
  const { values } = cells, body = values.map((line, i) => make("tr", {}, make("th", { scope: "row", textContent: rows[i] }), ...line.map((_, j) => {
    const text = isQuotient ? quotient(cells.exact[i][j], i) : cells.exact[i][j], isAllowed = !allowed || allowed[i][j], decimal = Number(values[i][j].toPrecision(4));
    const exact = !isAllowed && title.startsWith("Scores") ? "−∞" : text;
    const cell = make("td", { className: isAllowed ? "" : "hidden-cell" }, make("span", { className: "exact", textContent: exact }),
      exact === String(decimal).replace("-", "−") || exact === "−∞" ? "" : make("span", { className: "near", textContent: `≈ ${String(decimal).replace("-", "−")}` }));
    if (isShaded) cell.style.setProperty("--w", `${Math.round(50 * values[i][j])}%`);
    return cell;
  })));
  return make("div", { className: "scroll" }, make("table", { className: `exacts${isShaded ? " shaded" : ""}` }, make("caption", { textContent: title }),
    make("thead", {}, make("tr", {}, make("td"), ...columns.map((text) => make("th", { scope: "col", textContent: text })))), make("tbody", {}, ...body)));
}
