// Main script: the selection, and how keys, clicks and the URL change it.

const SHORT = 48; // maximum number of tokens of the combined view
const VIEWS = { "Tokens and matrix": ShortView, Tokens: TokenView, Image: PatchView, Matrix: MatrixView, Lines: LineView };
const state = { number: 0, head: 0, row: null, view: "", pool: "largest", back: 0 };
const at = (id) => document.getElementById(id);
let colors = palette(), current = null, lastDraw = 0, hoveredColumn = null, viewNote = "", wasDrawn = false;

const selectedMap = () => data.maps[state.number];

function viewsOf(map) {
  if (map.kind === "image" && data.image) return ["Image", "Matrix"];
  const isShort = Math.max(tokens(map.rows).length, tokens(map.columns).length) <= SHORT;
  return isShort ? ["Tokens and matrix", "Lines"] : ["Tokens", "Matrix", "Lines"];
}

let drawing = Promise.resolve(); // settled when the view is drawn

// Change the selection and redraw.
function go(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  const map = selectedMap();
  state.head = Math.max(0, Math.min(map.heads, state.head));
  const T = tokens(map.rows).length;
  state.row = state.row === null || state.row >= T ? middleOf(map) : Math.max(0, state.row);
  if (!viewsOf(map).includes(state.view)) state.view = viewsOf(map)[0];
  const onlyRow = current && ["number", "head", "view", "pool"].every((name) => before[name] === state[name]);
  if (onlyRow) current.shade(state.row);
  else drawing = draw();
  if (!onlyRow || before.row !== state.row) detail(state.row);
  remember();
}

// Return the index of the middle token, or of the middle patch of an image.
function middleOf(map) {
  const T = tokens(map.rows).length;
  if (!map.grid) return Math.floor(T / 2);
  const [rows, columns] = map.grid;
  return T - rows * columns + Math.floor(rows / 2) * columns + Math.floor(columns / 2);
}

async function draw() {
  const drawId = ++lastDraw, map = selectedMap(), isAll = state.view === "Lines" && state.head === map.heads && map.heads > 1;
  const weights = await matrix(state.number, state.head);
  const heads = isAll ? await Promise.all(Array.from({ length: map.heads }, (_, head) => matrix(state.number, head))) : null;
  if (drawId !== lastDraw || signal.aborted) return; // the selection changed while the matrix was decoded, or the view is closed
  heading(map);
  const context = {
    attentionMap: map, matrix: weights, heads, rows: tokens(map.rows), columns: tokens(map.columns), row: state.row, palette: colors,
    pool: state.pool, choose: (row) => go({ row }), preview, note: (text) => { viewNote = text; legend(); }, changed: () => legend(),
  };
  // Between heads over the same tokens, keep the view and its zoom, and replace the weights.
  const stays = current?.constructor === VIEWS[state.view] && current.rows === context.rows && current.columns === context.columns;
  const hadFocus = !stays && at("view").contains(document.activeElement);
  viewNote = "";
  if (stays) current.take(context);
  else mount(context);
  if (hadFocus) at("view").querySelector("[tabindex='0']")?.focus();
  legend();
  if (isMarkedNow && !stays) mark(isMarkedNow);
  wasDrawn = true; // from now on, scroll to the selection
  document.documentElement.dataset.ready = `${state.number}/${state.head}/${state.view}`;
}

function mount(context) {
  mount.ended?.abort();
  mount.ended = new AbortController();
  current = null;
  current = new VIEWS[state.view](at("view"), { ...context, ended: mount.ended.signal });
}

// Show the token under the pointer without selecting it; null returns to the selection.
function preview(row, column = null, from = null) {
  hoveredColumn = column;
  // A matrix marks the cell under the pointer itself, in addition to the selected row.
  if (from && current.tokens) current.tokens.shade(row ?? state.row);
  else if (!from) current.shade(row ?? state.row);
  detail(row ?? state.row);
  document.dispatchEvent(new CustomEvent("reportpreview", { detail: { map: selectedMap(), row, column } })); // for a surrounding page
}

let isMarkedNow = null;
// Mark the row and the columns for which `isMarked(map, axis, i)` is true, for a surrounding page.
function mark(isMarked) {
  isMarkedNow = isMarked; // a view that is drawn later shows the mark, too
  const map = selectedMap(), find = (axis, labels) => labels.findIndex((_, i) => isMarked(map, axis, i));
  const row = find("row", tokens(map.rows)), column = find("column", tokens(map.columns));
  current?.shade(row < 0 ? state.row : row, column < 0 ? null : column);
}

function heading(map) {
  const isAll = state.view === "Lines" && state.head === map.heads && map.heads > 1;
  at("where").textContent = `${map.title}, layer ${map.layer}, ${isAll ? "all heads" : headName(map, state.head)}`;
  const head = map.summary[state.head], what = at("what");
  what.replaceChildren();
  if (head) {
    what.append(make("b", { textContent: head.label }), ` ${head.score.toFixed(2)}   ·   entropy ${head.entropy.toFixed(2)}   ·   distance ${head.distance.toFixed(1)}`);
  } else what.append(map.heads === 1 ? "one head" : `${map.heads} heads`);
  keepingFocus(at("views"), () => at("views").replaceChildren(...viewsOf(map).map((name) => {
    const button = make("button", { type: "button", textContent: name });
    button.setAttribute("aria-pressed", String(name === state.view));
    button.addEventListener("click", () => go({ view: name }));
    return button;
  })));
  for (const thumb of document.querySelectorAll(".thumb")) {
    const isSelected = thumb.dataset.at === `${state.number}/${state.head}`;
    thumb.setAttribute("aria-pressed", String(isSelected));
    thumb.tabIndex = isSelected ? 0 : -1;
    if (isSelected && wasDrawn) thumb.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  measures.current(`${state.number}/${state.head}`);
}

// Restore the keyboard focus after buttons are replaced.
function keepingFocus(box, change) {
  const focusedText = box.contains(document.activeElement) ? document.activeElement.textContent : null;
  change();
  if (focusedText !== null) [...box.querySelectorAll("button")].find((button) => button.textContent === focusedText)?.focus();
}

function legend() {
  keepingFocus(at("legend"), () => at("legend").replaceChildren(...(current?.grid ? legendOf(current.grid) : [viewNote])));
}

function legendOf(grid) {
  const bar = renderCells({ codes: Uint8Array.from({ length: 256 }, (_, i) => i), columns: 256 }, [0, 0, 1, 256], 255, colors);
  const most = (grid.high / grid.matrix.top) ** 2, size = grid.rows.length * grid.columns.length;
  const parts = [make("span", { className: "scale" }, "0", bar, formatWeight(most) + (size > 4096 ? " and more" : ""))];
  if (grid.isPooled) parts.push(choices("Pixels show the", ["largest", "mean"], state.pool, (pool) => go({ pool })));
  if (Math.max(grid.rows.length, grid.columns.length) > 128) parts.push(zoomButtons());
  else if (selectedMap().kind === "cross") parts.push("A row is labeled by the token that it predicts; the weights of a row sum to 1.");
  else parts.push("Rows are queries, labeled by the token that is read; the weights of a row sum to 1.");
  return parts;
}

function choices(title, names, selected, select) {
  const group = make("span", { className: "choices", role: "group" });
  group.setAttribute("aria-label", title);
  for (const name of names) {
    const button = make("button", { type: "button", textContent: name });
    button.setAttribute("aria-pressed", String(name === selected));
    button.addEventListener("click", () => select(name));
    group.append(button);
  }
  return make("span", {}, `${title} `, group);
}

function zoomButtons() {
  const group = make("span", { className: "choices end", role: "group" });
  // At first zoom into the selected row; later into the middle of the view.
  const middle = () => (current.zoom === 1 ? [state.row, current.matrix.best(state.row, 1)[0]?.key ?? 0]
    : [current.y + current.rows.length / current.zoom / 2, current.x + current.columns.length / current.zoom / 2]);
  for (const [sign, label, act] of [["−", "zoom out", () => current.zoomBy(0.5, middle())], ["all", "reset zoom", () => current.zoomBy(0, null)],
    ["+", "zoom in", () => current.zoomBy(2, middle())]]) {
    const button = make("button", { type: "button", textContent: sign, title: label });
    button.setAttribute("aria-label", label);
    button.addEventListener("click", act);
    group.append(button);
  }
  return group;
}

// Fill the side table: weights of one query, largest contributions to it, and the scores of the head.
async function detail(row) {
  const drawId = (detail.lastDraw = (detail.lastDraw || 0) + 1), map = selectedMap(), number = state.number, head = state.head;
  const weights = await matrix(number, head);
  if (drawId !== detail.lastDraw || signal.aborted) return;
  const rows = tokens(map.rows), columns = tokens(map.columns), parts = [];
  const name = rows[row]?.trim() || rows[row] || "";
  const pointed = hoveredColumn === null ? [] : [make("p", { className: "note", textContent: `Under the pointer: ${columns[hoveredColumn]} ${formatWeight(weights.weight(row, hoveredColumn))}` })];
  parts.push(make("div", {}, make("p", { className: "of" }, name, " ", make("span", { className: "place", textContent: `${row + 1} of ${rows.length}` })),
    table("attends to", weights.best(row, 8).map(({ key, weight }) => [label(columns, key), gauge(weight), figure(formatWeight(weight))])), ...pointed));
  if (map.value_norms) parts.push(make("div", { id: "adds" }));
  const scores = map.summary[head]?.scores;
  if (scores) {
    const sorted = Object.entries(scores).sort((a, b) => b[1] - a[1]);
    parts.push(make("div", {}, table("pattern scores of this head", sorted.map(([pattern, score]) => [make("td", { textContent: pattern }), gauge(score), figure(score.toFixed(2))]))));
  }
  at("detail").replaceChildren(...parts);
  if (map.value_norms) addContributions(number, row, drawId);
}

// Add the largest contributions of all heads: weight × norm of the projected value, as shares of the total.
async function addContributions(number, row, drawId) {
  const map = data.maps[number], columns = tokens(map.columns), S = columns.length;
  map.lengths ??= unpack(map.value_norms.data, 16);
  const [lengths, ...heads] = await Promise.all([map.lengths, ...Array.from({ length: map.heads }, (_, head) => matrix(number, head))]);
  if (drawId !== detail.lastDraw || !at("adds")) return;
  const all = heads.flatMap((weights, head) => weights.best(row, 512).map(({ key, weight }) =>
    ({ head, key, length: weight * map.value_norms.max * (lengths[head * S + key] / 65535) ** 2 })));
  const total = all.reduce((sum, { length }) => sum + length, 0) || 1;
  all.sort((a, b) => b.length - a.length);
  at("adds").append(table("largest contributions, all heads", all.slice(0, 6).map(({ head, key, length }) => {
    const link = make("button", { type: "button", className: "head", textContent: `head ${head}` });
    link.addEventListener("click", () => go({ head, row }));
    return [label(columns, key), make("td", {}, link), figure(`${((100 * length) / total).toFixed(0)} %`)];
  })));
}

const figure = (text) => make("td", { className: "number", textContent: text });
const label = (labels, i) => make("th", { scope: "row", className: "key", title: `position ${i}` }, labels[i].trim() || labels[i], " ",
  make("span", { className: "place", textContent: i }));
const table = (caption, rows) => make("table", {}, make("caption", { textContent: caption }), make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))));

// Draw thumbnails of all heads: one row per layer, one column per head, then their mean.
async function overview() {
  const groups = new Map();
  data.maps.forEach((map, number) => groups.set(map.stack, [...(groups.get(map.stack) || []), number]));
  const boxes = [];
  for (const numbers of groups.values()) {
    const first = data.maps[numbers[0]], most = Math.max(...numbers.map((number) => data.maps[number].heads)) + 1;
    const side = Math.max(innerWidth < 720 ? 26 : 13, Math.min(34, Math.floor(316 / most) - 4, Math.floor(620 / numbers.length) - 4));
    const stack = make("div", { className: "stack" });
    stack.style.gridTemplateColumns = `auto repeat(${most}, ${side}px)`;
    stack.append(make("span"), ...Array.from({ length: most }, (_, head) => make("span", { className: "top", textContent: head === most - 1 ? "x̄" : head, title: head === most - 1 ? "mean of heads" : `head ${head}` })));
    boxes.push(make("section", {}, make("h3", { textContent: first.title }), stack));
    for (const number of numbers) {
      stack.append(make("span", { className: "name", textContent: data.maps[number].layer, title: data.maps[number].path }));
      stack.append(...(await thumbs(number, side)));
    }
  }
  if (!signal.aborted) at("heads").replaceChildren(...boxes);
}

async function thumbs(number, side) {
  const map = data.maps[number], { rows, columns, codes } = map.thumbs;
  map.thumbs.cells ??= await unpack(codes, 8);
  return Array.from({ length: map.heads + 1 }, (_, head) => {
    const cells = map.thumbs.cells.subarray(head * rows * columns, (head + 1) * rows * columns);
    const button = make("button", { type: "button", className: "thumb" },
      renderCells({ codes: cells, columns }, [0, 0, rows, columns], ceiling(cells, 255), colors));
    const pattern = map.summary[head] ? `: ${map.summary[head].label}` : "";
    button.title = `layer ${map.layer}, ${headName(map, head)}${pattern}`;
    button.setAttribute("aria-label", `${map.title}, ${button.title}`);
    Object.assign(button.style, { width: `${side}px`, height: `${side}px` });
    button.dataset.at = `${number}/${head}`;
    button.addEventListener("click", () => go({ number, head }));
    return button;
  });
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || at("help").open) return;
  if (event.target.closest?.("input, textarea, select")) return; // typing in a field
  const map = selectedMap(), order = data.order, place = order.indexOf(state.number), wrap = (n, length) => (n + length) % length;
  const names = viewsOf(map);
  const act = {
    ArrowLeft: () => go({ head: wrap(state.head - 1, map.heads + 1) }),
    ArrowRight: () => go({ head: wrap(state.head + 1, map.heads + 1) }),
    ArrowUp: () => go({ number: order[wrap(place - 1, order.length)] }),
    ArrowDown: () => go({ number: order[wrap(place + 1, order.length)] }),
    "[": () => go({ row: Math.max(0, state.row - 1) }),
    "]": () => go({ row: Math.min(tokens(map.rows).length - 1, state.row + 1) }),
    a: () => (state.head === map.heads ? go({ head: state.back }) : go({ back: state.head, head: map.heads })),
    "?": () => at("help").showModal(),
    1: () => names[0] && go({ view: names[0] }),
    2: () => names[1] && go({ view: names[1] }),
    3: () => names[2] && go({ view: names[2] }),
  }[event.key];
  if (!act) return;
  act();
  event.preventDefault();
}

// Store the selection in the URL.
function remember() {
  const params = new URLSearchParams({ layer: selectedMap().path, head: state.head === selectedMap().heads ? "mean" : state.head, row: state.row, view: state.view });
  try {
    history.replaceState(null, "", `#${params}`);
  } catch {
    // A notebook's iframe has no URL to change.
  }
}

function recalled() {
  const params = new URLSearchParams(location.hash.slice(1)), number = data.maps.findIndex((map) => map.path === params.get("layer"));
  const selection = number < 0 ? { ...data.start } : { number };
  if (params.has("head")) selection.head = params.get("head") === "mean" ? Infinity : Number(params.get("head")) || 0;
  if (params.has("row")) selection.row = Number(params.get("row")) || 0;
  if (params.get("view") in VIEWS) selection.view = params.get("view");
  return selection;
}

at("title").textContent = data.title;
// Return probabilities such as "a (71 %), b (20 %)" with bars.
function factOf(value) {
  const parts = value.split("), ").map((part) => /^(.*) \((\d+) %\)?$/.exec(part));
  if (parts.includes(null)) return [value];
  return parts.map(([, word, share]) => {
    const bar = make("span", { className: "chance" });
    bar.style.setProperty("--share", `${share}%`);
    return make("span", {}, `${word} `, bar, ` ${share} %`);
  });
}
at("facts").append(...data.metadata.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, ...factOf(value)))));
at("foot").textContent = data.footer;
const measures = new Measures((number, head) => { go({ number, head }); at("stage").scrollIntoView({ block: "nearest" }); });
const extras = [data.rollouts.length ? rolloutBox() : null, data.norms.length ? normsBox() : null].filter(Boolean);
at("more").append(measures.box, ...extras.map(({ box }) => box));
at("help-open").addEventListener("click", () => at("help").showModal());
addEventListener("keydown", keys, { signal });

async function paint() {
  colors = palette();
  await overview(); // first, because its width determines the width of the main view
  if (signal.aborted) return;
  current = null;
  go({});
  for (const extra of extras) extra.draw();
  await drawing;
}
Object.assign(state, recalled());
const painted = paint();
isDark.addEventListener("change", paint, { signal });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (signal.aborted) return; current = null; draw(); extras.forEach((extra) => extra.draw()); }, 150); }, { signal });
// Return the selected map for a surrounding page: its path, kind, stack, number of rows, and the head (null for the mean).
const rowsOf = () => { const map = selectedMap(); return { path: map.path, kind: map.kind, stack: map.stack, length: tokens(map.rows).length, head: state.head >= map.heads ? null : state.head }; };
const api = { go, state, mark, rowsOf, painted };
