// The page itself: what is chosen, and how keys, clicks and the address change it.

const SHORT = 48; // tokens, up to which text and matrix fit one view
const VIEWS = { "Tokens and matrix": ShortView, Tokens: TokenView, Picture: PatchView, Matrix: MatrixView, Lines: LineView };
const state = { number: 0, head: 0, row: null, view: "", pool: "largest", back: 0 };
const at = (id) => document.getElementById(id);
let colors = palette(), current = null, turn = 0, over = null, said = "", wasDrawn = false;

const picture = () => data.maps[state.number];

function viewsOf(one) {
  if (one.kind === "image" && data.image) return ["Picture", "Matrix"];
  const isShort = Math.max(tokens(one.rows).length, tokens(one.columns).length) <= SHORT;
  return isShort ? ["Tokens and matrix", "Lines"] : ["Tokens", "Matrix", "Lines"];
}

// Change what is chosen, and draw what follows from it.
function go(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  const one = picture();
  state.head = Math.max(0, Math.min(one.heads, state.head));
  const T = tokens(one.rows).length;
  state.row = state.row === null || state.row >= T ? middleOf(one) : Math.max(0, state.row);
  if (!viewsOf(one).includes(state.view)) state.view = viewsOf(one)[0];
  const onlyRow = current && ["number", "head", "view", "pool"].every((name) => before[name] === state[name]);
  if (onlyRow) current.shade(state.row);
  else draw();
  if (!onlyRow || before.row !== state.row) detail(state.row);
  remember();
}

// The token in the middle; of a picture, the patch in its middle.
function middleOf(one) {
  const T = tokens(one.rows).length;
  if (!one.grid) return Math.floor(T / 2);
  const [rows, columns] = one.grid;
  return T - rows * columns + Math.floor(rows / 2) * columns + Math.floor(columns / 2);
}

async function draw() {
  const mine = ++turn, one = picture(), isAll = state.view === "Lines" && state.head === one.heads && one.heads > 1;
  const found = await matrix(state.number, state.head);
  const heads = isAll ? await Promise.all(Array.from({ length: one.heads }, (_, head) => matrix(state.number, head))) : null;
  if (mine !== turn) return; // something else was chosen while this was being unpacked
  heading(one);
  const context = {
    picture: one, matrix: found, heads, rows: tokens(one.rows), columns: tokens(one.columns), row: state.row, palette: colors,
    pool: state.pool, choose: (row) => go({ row }), preview, note: (text) => { said = text; legend(); }, changed: () => legend(),
  };
  // Between heads over the same tokens the view stays as it is, zoom and all, and only its weights change.
  const stays = current?.constructor === VIEWS[state.view] && current.rows === context.rows && current.columns === context.columns;
  const hadFocus = !stays && at("view").contains(document.activeElement);
  said = "";
  if (stays) current.take(context);
  else mount(context);
  if (hadFocus) at("view").querySelector("[tabindex='0']")?.focus();
  legend();
  wasDrawn = true; // from now on what is chosen is brought into sight
  document.documentElement.dataset.ready = `${state.number}/${state.head}/${state.view}`;
}

function mount(context) {
  mount.ended?.abort();
  mount.ended = new AbortController();
  current = null;
  current = new VIEWS[state.view](at("view"), { ...context, ended: mount.ended.signal });
}

// A token under the pointer is shown without being chosen; null goes back to the chosen one.
function preview(row, column = null, from = null) {
  over = column;
  // A matrix marks the cell under the pointer itself, beside the row that is chosen.
  if (from && current.tokens) current.tokens.shade(row ?? state.row);
  else if (!from) current.shade(row ?? state.row);
  detail(row ?? state.row);
}

function heading(one) {
  const isAll = state.view === "Lines" && state.head === one.heads && one.heads > 1;
  at("where").textContent = `${one.title}, layer ${one.layer}, ${isAll ? "all heads" : headName(one, state.head)}`;
  const head = one.summary[state.head], what = at("what");
  what.replaceChildren();
  if (head) {
    what.append(make("b", { textContent: head.label }), ` ${head.score.toFixed(2)}   ·   entropy ${head.entropy.toFixed(2)}   ·   distance ${head.distance.toFixed(1)}`);
  } else what.append(one.heads === 1 ? "one head" : `${one.heads} heads together`);
  keepingFocus(at("views"), () => at("views").replaceChildren(...viewsOf(one).map((name) => {
    const button = make("button", { type: "button", textContent: name });
    button.setAttribute("aria-pressed", String(name === state.view));
    button.addEventListener("click", () => go({ view: name }));
    return button;
  })));
  for (const thumb of document.querySelectorAll(".thumb")) {
    const chosen = thumb.dataset.at === `${state.number}/${state.head}`;
    thumb.setAttribute("aria-pressed", String(chosen));
    thumb.tabIndex = chosen ? 0 : -1;
    if (chosen && wasDrawn) thumb.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  measures.current(`${state.number}/${state.head}`);
}

// Buttons that are made anew must not lose a keyboard's place.
function keepingFocus(box, change) {
  const words = box.contains(document.activeElement) ? document.activeElement.textContent : null;
  change();
  if (words !== null) [...box.querySelectorAll("button")].find((button) => button.textContent === words)?.focus();
}

function legend() {
  keepingFocus(at("legend"), () => at("legend").replaceChildren(...(current?.grid ? legendOf(current.grid) : [said])));
}

function legendOf(grid) {
  const bar = painted({ codes: Uint8Array.from({ length: 256 }, (_, i) => i), columns: 256 }, [0, 0, 1, 256], 255, colors);
  const most = (grid.high / grid.matrix.top) ** 2, size = grid.rows.length * grid.columns.length;
  const parts = [make("span", { className: "scale" }, "0", bar, show(most) + (size > 4096 ? " and more" : ""))];
  if (grid.isPooled) parts.push(choices("A pixel shows the", ["largest", "mean"], state.pool, (pool) => go({ pool })));
  if (Math.max(grid.rows.length, grid.columns.length) > 128) parts.push(zoomButtons());
  else parts.push("A row is a query; what it gives to the keys adds up to 1.");
  return parts;
}

function choices(title, names, chosen, select) {
  const group = make("span", { className: "choices", role: "group" });
  group.setAttribute("aria-label", title);
  for (const name of names) {
    const button = make("button", { type: "button", textContent: name });
    button.setAttribute("aria-pressed", String(name === chosen));
    button.addEventListener("click", () => select(name));
    group.append(button);
  }
  return make("span", {}, `${title} `, group);
}

function zoomButtons() {
  const group = make("span", { className: "choices end", role: "group" });
  // From afar the chosen row stays in sight; closer up, what is in the middle.
  const middle = () => (current.zoom === 1 ? [state.row, current.matrix.best(state.row, 1)[0]?.key ?? 0]
    : [current.y + current.rows.length / current.zoom / 2, current.x + current.columns.length / current.zoom / 2]);
  for (const [sign, words, act] of [["−", "farther", () => current.closer(0.5, middle())], ["all", "all of it", () => current.closer(0, null)],
    ["+", "closer", () => current.closer(2, middle())]]) {
    const button = make("button", { type: "button", textContent: sign, title: words });
    button.setAttribute("aria-label", words);
    button.addEventListener("click", act);
    group.append(button);
  }
  return group;
}

// The table beside the picture: what one token looks at, what adds most to it, what the head does.
async function detail(row) {
  const mine = (detail.turn = (detail.turn || 0) + 1), one = picture(), number = state.number, head = state.head;
  const found = await matrix(number, head);
  if (mine !== detail.turn) return;
  const rows = tokens(one.rows), columns = tokens(one.columns), parts = [];
  const name = rows[row]?.trim() || rows[row] || "";
  const pointed = over === null ? [] : [make("p", { className: "note", textContent: `Under the pointer: ${columns[over]} ${show(found.weight(row, over))}` })];
  parts.push(make("div", {}, make("p", { className: "of" }, name, " ", make("span", { className: "place", textContent: `${row + 1} of ${rows.length}` })),
    table("looks at", found.best(row, 8).map(({ key, weight }) => [label(columns, key), gauge(weight), figure(show(weight))])), ...pointed));
  if (one.value_norms) parts.push(make("div", { id: "adds" }));
  const scores = one.summary[head]?.scores;
  if (scores) {
    const sorted = Object.entries(scores).sort((a, b) => b[1] - a[1]);
    parts.push(make("div", {}, table("this head's patterns", sorted.map(([pattern, score]) => [make("td", { textContent: pattern }), gauge(score), figure(score.toFixed(2))]))));
  }
  at("detail").replaceChildren(...parts);
  if (one.value_norms) adds(number, row, mine);
}

// The largest contributions of all heads: weight × length of what the value adds, as shares of all of them.
async function adds(number, row, mine) {
  const one = data.maps[number], columns = tokens(one.columns), S = columns.length;
  one.lengths ??= unpack(one.value_norms.data, 16);
  const [lengths, ...heads] = await Promise.all([one.lengths, ...Array.from({ length: one.heads }, (_, head) => matrix(number, head))]);
  if (mine !== detail.turn || !at("adds")) return;
  const all = heads.flatMap((found, head) => found.best(row, 512).map(({ key, weight }) =>
    ({ head, key, length: weight * one.value_norms.max * (lengths[head * S + key] / 65535) ** 2 })));
  const total = all.reduce((sum, { length }) => sum + length, 0) || 1;
  all.sort((a, b) => b.length - a.length);
  at("adds").append(table("adds most to it, over all heads", all.slice(0, 6).map(({ head, key, length }) => {
    const link = make("button", { type: "button", className: "head", textContent: `head ${head}` });
    link.addEventListener("click", () => go({ head, row }));
    return [label(columns, key), make("td", {}, link), figure(`${((100 * length) / total).toFixed(0)} %`)];
  })));
}

const figure = (text) => make("td", { className: "number", textContent: text });
const label = (labels, i) => make("th", { scope: "row", className: "key", title: `position ${i}` }, labels[i].trim() || labels[i], " ",
  make("span", { className: "place", textContent: i }));
const table = (caption, rows) => make("table", {}, make("caption", { textContent: caption }), make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))));

// The grid of all heads: a row a layer, a column a head, the last column their mean.
async function overview() {
  const groups = new Map();
  data.maps.forEach((one, number) => groups.set(one.stack, [...(groups.get(one.stack) || []), number]));
  const boxes = [];
  for (const numbers of groups.values()) {
    const first = data.maps[numbers[0]], most = Math.max(...numbers.map((number) => data.maps[number].heads)) + 1;
    const side = Math.max(15, Math.min(34, Math.floor(316 / most) - 4));
    const stack = make("div", { className: "stack" });
    stack.style.gridTemplateColumns = `auto repeat(${most}, ${side}px)`;
    stack.append(make("span"), ...Array.from({ length: most }, (_, head) => make("span", { className: "top", textContent: head === most - 1 ? "x̄" : head, title: head === most - 1 ? "mean of heads" : `head ${head}` })));
    boxes.push(make("section", {}, make("h3", { textContent: first.title }), stack));
    for (const number of numbers) {
      stack.append(make("span", { className: "name", textContent: data.maps[number].layer, title: data.maps[number].path }));
      stack.append(...(await thumbs(number, side)));
    }
  }
  at("heads").replaceChildren(...boxes);
}

async function thumbs(number, side) {
  const one = data.maps[number], { rows, columns, codes } = one.thumbs;
  one.thumbs.cells ??= await unpack(codes, 8);
  return Array.from({ length: one.heads + 1 }, (_, head) => {
    const cells = one.thumbs.cells.subarray(head * rows * columns, (head + 1) * rows * columns);
    const button = make("button", { type: "button", className: "thumb" },
      painted({ codes: cells, columns }, [0, 0, rows, columns], ceiling(cells, 255), colors));
    const pattern = one.summary[head] ? `: ${one.summary[head].label}` : "";
    button.title = `layer ${one.layer}, ${headName(one, head)}${pattern}`;
    button.setAttribute("aria-label", `${one.title}, ${button.title}`);
    Object.assign(button.style, { width: `${side}px`, height: `${side}px` });
    button.dataset.at = `${number}/${head}`;
    button.addEventListener("click", () => go({ number, head }));
    return button;
  });
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || at("help").open) return;
  if (event.target.closest?.("input, textarea, select")) return; // they are written in
  const one = picture(), order = data.order, place = order.indexOf(state.number), wrap = (n, length) => (n + length) % length;
  const names = viewsOf(one);
  const act = {
    ArrowLeft: () => go({ head: wrap(state.head - 1, one.heads + 1) }),
    ArrowRight: () => go({ head: wrap(state.head + 1, one.heads + 1) }),
    ArrowUp: () => go({ number: order[wrap(place - 1, order.length)] }),
    ArrowDown: () => go({ number: order[wrap(place + 1, order.length)] }),
    "[": () => go({ row: Math.max(0, state.row - 1) }),
    "]": () => go({ row: Math.min(tokens(one.rows).length - 1, state.row + 1) }),
    a: () => (state.head === one.heads ? go({ head: state.back }) : go({ back: state.head, head: one.heads })),
    "?": () => at("help").showModal(),
    1: () => names[0] && go({ view: names[0] }),
    2: () => names[1] && go({ view: names[1] }),
    3: () => names[2] && go({ view: names[2] }),
  }[event.key];
  if (!act) return;
  act();
  event.preventDefault();
}

// The address keeps what is chosen, so that a link shows it.
function remember() {
  const words = new URLSearchParams({ layer: picture().path, head: state.head === picture().heads ? "mean" : state.head, row: state.row, view: state.view });
  try {
    history.replaceState(null, "", `#${words}`);
  } catch {
    // Inside a notebook's frame the page has no address of its own.
  }
}

function recalled() {
  const words = new URLSearchParams(location.hash.slice(1)), number = data.maps.findIndex((one) => one.path === words.get("layer"));
  const chosen = number < 0 ? { ...data.start } : { number };
  if (words.has("head")) chosen.head = words.get("head") === "mean" ? Infinity : Number(words.get("head")) || 0;
  if (words.has("row")) chosen.row = Number(words.get("row")) || 0;
  if (words.get("view") in VIEWS) chosen.view = words.get("view");
  return chosen;
}

at("title").textContent = data.title;
// Chances, such as "a (71 %), b (20 %)", have a bar each.
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
  await overview(); // before the rest: its width decides how much the picture gets
  current = null;
  go({});
  for (const extra of extras) extra.draw();
}
Object.assign(state, recalled());
paint();
isDark.addEventListener("change", paint, { signal });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { current = null; draw(); extras.forEach((extra) => extra.draw()); }, 150); }, { signal });
