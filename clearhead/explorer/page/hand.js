// Attention by hand: a few vectors in the plane, dragged or typed, and every number that follows, exact.
import { Latest, ask, choices, draw, field, make, ready, saving } from "./tools.js";

const DEFAULTS = { x: "1,0;0,1;1/2,1/2;-1/2,1", order: "", beta: "1", mask: "full()", key: 0, noise: "0,0", length: "1" };
const KINDS = {
  soft: { beta: "1", mask: "full()", order: "" },
  hard: { beta: "inf", mask: "full()", order: "" },
  uniform: { beta: "0", mask: "full()", order: "" },
  identity: { beta: "inf", mask: "window(0, 0)", order: "" },
  permutation: { beta: "inf", mask: "full()", order: "next", x: "1,0;0,1;-1,0;0,-1" },
  convolution: { beta: "0", mask: "window(1, 1)", order: "" },
};
const SIDE = 320, REACH = 2; // the plane shows −2 … 2

const parse = (text) => text.split(";").map((pair) => pair.split(",").map((cell) => cell.trim()));
const value = (cell) => { const [top, under = 1] = cell.replace("−", "-").split("/"); return Number(top) / Number(under); };

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given, key: Number(given.key) || 0 }, latest = new Latest(signal);
  const plane = draw("svg", { class: "plane", viewBox: `0 0 ${SIDE} ${SIDE}`, role: "group" });
  plane.setAttribute("aria-label", "The vectors in the plane; arrow keys move the one that has the focus");
  const rows = make("div", { className: "vectors" }), wrong = make("p", { className: "caret", role: "alert" }), kind = make("p", { className: "kind" });
  const out = make("div", { className: "matrices" });
  const input = (words, name, more = {}) => field(words, make("input", { type: "text", value: state[name], className: "code typed", spellcheck: false, ...more, on: { input(event) { go({ [name]: event.target.value }); } } }));
  const beta = input("β (0, 2, 3/2, inf)", "beta"), mask = input("Mask", "mask", { className: "code" });
  const length = input("Length of that key, ×", "length"), noise = input("Noise on it (x, y)", "noise");
  const key = field("Disturb key", make("select", { on: { change(event) { go({ key: Number(event.target.value) }); } } }));
  const order = field("Queries", make("select", { on: { change(event) { go({ order: event.target.value }); } } },
    ...[["", "the vectors themselves"], ["next", "each the next one"], ["back", "in reverse order"]].map(([name, words]) => make("option", { value: name, textContent: words }))));
  const warm = make("input", { type: "range", min: -3, max: 3, step: 0.25, value: Math.log2(Number(state.beta)) || 0, ariaLabel: "β as a slider, from 1/8 to 8",
    on: { input() { go({ beta: String(Math.round(1000 * 2 ** warm.value) / 1000) }); } } });
  beta.append(warm);
  box.append(make("h1", { textContent: "Attention by hand" }),
    make("p", { className: "lead", textContent: "Queries are the vectors in some order, keys are the vectors with one of them disturbed, values are the vectors: softmax(β·Q·Kᵀ)·X, in exact numbers. Drag a tip, or type fractions." }),
    choices("What attention can do", Object.keys(KINDS), "", (name) => go({ ...DEFAULTS, key: state.key, x: state.x, ...KINDS[name] })),
    make("div", { className: "form top-gap" }, beta, mask, order, key, length, noise),
    wrong,
    make("div", { className: "byhand" }, make("figure", {}, plane, make("figcaption", {}, "Vectors, and the outputs as rings ", saving("vectors", plane)), rows), make("div", {}, kind, out)));

  const vectors = () => parse(state.x);
  const orders = (n) => ({ next: [...Array(n).keys()].map((i) => (i + 1) % n), back: [...Array(n).keys()].reverse() }[state.order] ?? []);
  const spots = { from: (x, y) => [SIDE / 2 + (x * SIDE) / 2 / REACH, SIDE / 2 - (y * SIDE) / 2 / REACH] };

  function go(changes) {
    Object.assign(state, changes);
    const all = vectors();
    state.key = Math.min(state.key, all.length - 1);
    for (const [boxed, name] of [[beta, "beta"], [mask, "mask"], [length, "length"], [noise, "noise"]]) {
      const typed = boxed.querySelector("input");
      if (typed.value !== state[name] && typed !== document.activeElement) typed.value = state[name];
    }
    order.querySelector("select").value = state.order;
    key.querySelector("select").replaceChildren(...all.map((_, i) => make("option", { value: i, textContent: `x${i + 1}`, selected: i === state.key })));
    remember(state, DEFAULTS);
    list(all);
    picture(all, null);
    latest.run((stop) => ask("hand", {
      vectors: all, order: orders(all.length), beta: state.beta, mask: state.mask, key: state.key, noise: parse(state.noise)[0], length: state.length,
    }, { signal: stop }), (found) => show(all, found), (error) => { wrong.textContent = error.message; out.classList.add("old"); ready("refused"); });
  }

  const set = (i, pair) => { const all = vectors(); all[i] = pair; go({ x: all.map((one) => one.join(",")).join(";") }); };

  function list(all) {
    if (rows.contains(document.activeElement) && rows.children.length === all.length + 1) return; // somebody types there
    rows.replaceChildren(...all.map((pair, i) => make("div", { className: "vector" }, make("b", { textContent: `x${i + 1}` }),
      ...pair.map((cell, j) => make("input", { type: "text", value: cell, className: "code cell", ariaLabel: `x${i + 1}, ${j ? "second" : "first"} number`, on: {
        input(event) { const now = vectors(); now[i][j] = event.target.value; go({ x: now.map((one) => one.join(",")).join(";") }); } } })),
      all.length > 3 ? make("button", { type: "button", textContent: "×", title: `Remove x${i + 1}`, ariaLabel: `Remove x${i + 1}`, on: { click() {
        go({ x: vectors().filter((_, k) => k !== i).map((one) => one.join(",")).join(";") }); } } }) : null)),
      make("div", {}, all.length < 6 ? make("button", { type: "button", className: "act", textContent: "Add a vector", on: { click() { go({ x: `${state.x};1/2,-1/2` }); } } }) : ""));
  }

  function picture(all, found) {
    const focused = plane.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    const [cx, cy] = spots.from(0, 0), ends = all.map((pair) => spots.from(...pair.map(value)));
    plane.replaceChildren(draw("rect", { class: "paper", width: SIDE, height: SIDE }),
      ...[-1, 1].flatMap((at) => { const [x, y] = spots.from(at, at); return [draw("path", { class: "grid", d: `M${x} 0V${SIDE}M0 ${y}H${SIDE}` })]; }),
      draw("path", { class: "axis", d: `M${cx} 0V${SIDE}M0 ${cy}H${SIDE}` }),
      ...ends.flatMap(([x, y], i) => (Number.isFinite(x + y) ? [draw("line", { class: "arrow", x1: cx, y1: cy, x2: x, y2: y })] : [])),
      ...(found ? found.outputs.values.map(([x, y], i) => { const [a, b] = spots.from(x, y); return draw("circle", { class: "output", cx: a, cy: b, r: 6 }, draw("title", {}, `output ${i + 1}`)); }) : []),
      ...ends.flatMap(([x, y], i) => {
        if (!Number.isFinite(x + y)) return [];
        const tip = draw("circle", { class: "tip-of", cx: x, cy: y, r: 9, tabindex: 0, role: "button", "aria-label": `x${i + 1} at ${all[i].join(", ")}` });
        tip.dataset.at = i;
        return [tip, draw("text", { x: x + 12, y: y - 8 }, `x${i + 1}`)];
      }));
    if (focused !== null) plane.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  // Tips are dragged in steps of an eighth, so that the numbers stay short.
  let held = null;
  const eighths = (number) => { const whole = Math.round(8 * Math.max(-REACH, Math.min(REACH, number))); let under = 8, top = whole; while (under > 1 && top % 2 === 0) { top /= 2; under /= 2; } return under === 1 ? String(top) : `${top}/${under}`; };
  plane.addEventListener("pointerdown", (event) => { if (event.target.dataset.at !== undefined) { held = Number(event.target.dataset.at); plane.setPointerCapture(event.pointerId); } });
  plane.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const frame = plane.getBoundingClientRect(), at = (2 * REACH) / frame.width;
    set(held, [eighths((event.clientX - frame.left) * at - REACH), eighths(REACH - (event.clientY - frame.top) * at)]);
  });
  for (const end of ["pointerup", "pointercancel"]) plane.addEventListener(end, () => { held = null; });
  plane.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key], i = event.target.dataset.at;
    if (!step || i === undefined) return;
    event.preventDefault();
    set(Number(i), vectors()[i].map((cell, j) => eighths(value(cell) + step[j] / 8)));
  });

  function show(all, found) {
    wrong.textContent = "";
    out.classList.remove("old");
    picture(all, found);
    const [name, says] = found.kind.split(": ");
    kind.replaceChildren(make("b", { textContent: name }), says ? `: ${says}.` : ".", found.moved > 0 ? ` The disturbance moves a weight by up to ${found.moved.toPrecision(3)}.` : "");
    const n = all.length, labels = [...Array(n).keys()].map((i) => `x${i + 1}`), from = orders(n), asked = labels.map((_, i) => `q${i + 1}${from.length ? ` = x${from[i] + 1}` : ""}`);
    const { sums } = found, keys = labels.map((_, i) => `k${i + 1}`);
    out.replaceChildren(
      matrix("Scores Q·Kᵀ", found.scores, asked, keys, found.allowed),
      matrix("Weights", found.weights, asked, keys, found.allowed, true, Boolean(sums)),
      sums ? matrix("Z: what each row is divided by", sums, asked.map((_, i) => `Z${below(i)}`), [""]) : "",
      matrix("Outputs: weights · X", found.outputs, asked, ["1st", "2nd"], null, false, Boolean(sums)));
    ready(`hand ${state.x} ${state.beta} ${name}`);
  }

  go({});
}

const below = (i) => "₁₂₃₄₅₆"[i];

// A number that is divided by the sum of its row.
const over = (words, i) => (!words || words === "0" ? words : `${/ [+−] /.test(words) ? `(${words})` : words}/Z${below(i)}`);

// A matrix: the exact number, and under it the decimals; weights are shaded by their size.
function matrix(title, cells, rows, columns, allowed = null, isShaded = false, isOver = false) {
  const { values } = cells, body = values.map((line, i) => make("tr", {}, make("th", { scope: "row", textContent: rows[i] }), ...line.map((_, j) => {
    const words = isOver ? over(cells.exact[i][j], i) : cells.exact[i][j], may = !allowed || allowed[i][j], near = Number(values[i][j].toPrecision(4));
    const plain = !may && title.startsWith("Scores") ? "−∞" : words;
    const cell = make("td", { className: may ? "" : "hidden-cell" }, make("span", { className: "exact", textContent: plain }),
      plain === String(near).replace("-", "−") || plain === "−∞" ? "" : make("span", { className: "near", textContent: `≈ ${String(near).replace("-", "−")}` }));
    if (isShaded) cell.style.setProperty("--w", `${Math.round(70 * values[i][j])}%`);
    return cell;
  })));
  return make("div", { className: "scroll" }, make("table", { className: `exacts${isShaded ? " shaded" : ""}` }, make("caption", { textContent: title }),
    make("thead", {}, make("tr", {}, make("td"), ...columns.map((text) => make("th", { scope: "col", textContent: text })))), make("tbody", {}, ...body)));
}
