// The drawing of the model: one box per step or branch; every box leads to its steps. Uses the functions of walk.js.

const LABELS = { characters: "Characters", pixels: "Pixels", tokens: "Tokens and ids", start: "Target tokens", embedding: "Embedding",
  patches: "Patches", front: "Prefix token", position: "Positions", norm: "Norm", add: "+", pool: "Pooling", logits: "Logits",
  softmax: "Softmax", next: "Next token", answer: "Answer", bias: "Position bias", between: "…", linear: "Linear", vectors: "Vectors" };
const WIDE = 148, HIGH = 26, GAP = 13, SIDE = 32, TOP = 30, COLUMN = 240;

// Return the stack of a section: "encoder" for "encoder.blocks.3".
const stackOf = (section) => section.path.replace(/(^|\.)[^.]+\.\d+$/, "");
function columnsOf() {
  const stacks = [...new Set(sections.filter((section) => section.block !== null).map(stackOf))];
  const column = (section) => Math.max(0, stacks.findIndex((name) => name !== "" && section.path.startsWith(name)));
  return { stacks, column };
}
// Return the boxes of a section: one if it is folded, otherwise one per step or branch.
function nodesOf(section, open) {
  if (!open) return [{ first: section.first, last: section.last, label: section.title, kind: "folded" }];
  const nodes = [];
  for (let i = section.first; i <= section.last; i++) {
    const { branch, role } = steps[i], before = nodes[nodes.length - 1];
    if (branch && before?.branch === branch) before.last = i;
    else nodes.push({ first: i, last: i, branch, role, kind: branch.includes("attention") ? "attention" : role,
      label: branch ? branch[0].toUpperCase() + branch.slice(1) : LABELS[role] ?? role });
  }
  return nodes;
}

function drawing() {
  const { stacks, column } = columnsOf(), shown = openBlocks(), bottom = [TOP, TOP], placed = [], boxes = [];
  for (const section of sections) {
    const c = column(section), open = section.block === null || shown.has(section.path), isBlock = section.block !== null;
    const x = c * COLUMN + SIDE, top = bottom[c];
    let y = top + (isBlock && open ? 28 : 0);
    for (const node of nodesOf(section, open)) {
      placed.push({ ...node, x, y, c, section });
      y += HIGH + GAP;
    }
    if (isBlock && open) {
      boxes.push(draw("rect", { class: "block", x: x - 26, y: top, width: WIDE + 44, height: y - top - GAP + 8, rx: 9 }),
        svgText(section.title, x - 18, top + 12, "title"), svgText(section.order, x + WIDE + 12, top + 12, "title", "end"));
      y += 8;
    }
    bottom[c] = y;
  }
  const nodeOf = (i) => placed.find((node) => node.first <= i && i <= node.last);
  const height = Math.max(...bottom) + 4, width = (stacks.length > 1 ? 2 : 1) * COLUMN - 24;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "group" },
    draw("defs", {}, draw("marker", { id: "tip", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 5, markerHeight: 5, orient: "auto" },
      draw("path", { d: "M0 0L6 3L0 6z" }))));
  columnTitles(stacks).forEach((title, c) => svg.append(svgText(title, c * COLUMN + SIDE + WIDE / 2, 16, "column", "middle")));
  svg.append(...boxes, ...placed.flatMap((node) => edges(node, nodeOf, placed)), ...loop(placed), ...placed.map(box));
  const now = placed.find((node) => node.first <= state.step && state.step <= node.last);
  if (following && now) { // a dot moves from box to box
    const dot = draw("circle", { class: "dot", r: 7, cx: 0, cy: 0 }), where = `translate(${now.x + WIDE / 2}px, ${now.y + HIGH / 2}px)`;
    dot.style.transform = drawing.before ?? where;
    svg.append(dot);
    requestAnimationFrame(() => requestAnimationFrame(() => { dot.style.transform = where; }));
    drawing.before = where;
  }
  at("drawing").replaceChildren(svg);
  const here = svg.querySelector(".here"), frame = at("drawing");
  if (here && frame.scrollHeight > frame.clientHeight)
    frame.scrollTop = (here.getBBox().y / height) * frame.scrollHeight - frame.clientHeight / 2;
}
// Return the blocks drawn in full: the selected one, and the block of the same index in other stacks.
function openBlocks() {
  const now = sections[sectionOf[state.step]];
  if (now.block !== null) openBlocks.number = now.block;
  const open = new Set(), stacks = columnsOf().stacks;
  for (const stack of stacks) {
    const blocks = sections.filter((section) => section.block !== null && stackOf(section) === stack);
    open.add((blocks.find((section) => section.block === (openBlocks.number ?? 0)) ?? blocks[0]).path);
  }
  return open;
}
function columnTitles(stacks) {
  return stacks.map((stack) => {
    const count = sections.filter((section) => section.block !== null && stackOf(section) === stack).length;
    const name = stack.split(".").pop() || data.kind;
    return `${name[0].toUpperCase()}${name.slice(1)}, ${count} block${count > 1 ? "s" : ""}`;
  });
}
const svgText = (text, x, y, kind, anchor = "start") => draw("text", { x, y, class: kind, "text-anchor": anchor }, text);

function box(node) {
  const here = node.first <= state.step && state.step <= node.last, round = node.role === "add";
  const middle = [node.x + WIDE / 2, node.y + HIGH / 2];
  const shape = round ? draw("circle", { cx: middle[0], cy: middle[1], r: 11 })
    : draw("rect", { x: node.x, y: node.y, width: WIDE, height: HIGH, rx: 6 });
  const group = draw("g", { class: `node ${node.kind}${here ? " here" : ""}`, tabindex: 0, role: "button",
    "aria-label": `${node.section.title}: ${round ? "add" : node.label}`, "aria-pressed": here }, shape, svgText(node.label, ...middle, ""));
  group.addEventListener("click", () => go({ step: node.first }));
  group.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go({ step: node.first }); }
  });
  return group;
}
// Return the arrows into a box: straight from the box above, around the side from earlier boxes, across from the other stack.
function edges(node, nodeOf, placed) {
  const sources = new Set();
  for (let i = node.first; i <= node.last; i++) for (const source of steps[i].sources) {
    const from = nodeOf(source);
    if (from && from !== node) sources.add(from);
  }
  const column = placed.filter((other) => other.c === node.c), above = column[column.indexOf(node) - 1];
  if (!sources.size && above) sources.add(above);
  const x = node.x + WIDE / 2, half = node.role === "add" ? 11 : HIGH / 2, mid = node.y + HIGH / 2;
  let side = 0;
  return [...sources].map((from) => {
    if (from === above) return draw("path", { d: `M${x} ${from.y + HIGH / 2 + (from.role === "add" ? 11 : HIGH / 2)}V${mid - half - 1}` });
    if (from.c !== node.c) {
      const out = from.x + WIDE, channel = out + 22;
      return draw("path", { class: "memory", d: `M${out} ${from.y + HIGH / 2}H${channel}V${mid}H${node.x - 1}` });
    }
    // Edges from outside a block start inside it, below its title.
    const top = from.section === node.section ? from.y + HIGH + (from.role === "add" ? -2 : 0) : placed.find((other) => other.section === node.section).y - GAP;
    const start = top + GAP / 2 - 1, left = node.x - 10 - 6 * side++;
    const into = node.role === "add" ? x - 12 : node.x - 1;
    return draw("path", { class: "skip", d: `M${x} ${start}H${left}V${mid}H${into}` });
  });
}

// The predicted token is the input of the next step.
function loop(placed) {
  const end = placed.find((node) => node.role === "next"), start = placed.find((node) => node.c === end?.c && ["start", "tokens"].includes(node.role));
  if (!end || !start) return [];
  const right = end.x + WIDE, out = right + 26;
  return [draw("path", { class: "loop", d: `M${right} ${end.y + HIGH / 2}H${out}V${start.y + HIGH / 2}H${right + 1}` })];
}

// Save the drawing as an SVG file; computed styles become attributes, so that it needs no style sheet.
function saveDrawing() {
  const svg = at("drawing").querySelector("svg"), copy = svg.cloneNode(true), from = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(from[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline"]) element.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const link = make("a", { href: URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" })), download: "architecture.svg" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
