// Views of one query: shaded text, lines between tokens, and patches of an image.

// Return the background of a share of the color scale, and black or white text, whichever has the greater contrast.
function shadeOf(share) {
  const style = getComputedStyle(document.documentElement);
  const [from, to] = ["--card", "--heat"].map((name) => [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16)));
  const mixed = from.map((value, i) => Math.round(value + (to[i] - value) * Math.min(1, share)));
  const luminance = mixed.reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4), 0);
  return { backgroundColor: `rgb(${mixed.join(" ")})`, color: luminance > 0.179 ? "#000" : "#fff" };
}

// Return tokens as spans that can be shaded, with the line breaks of the text.
function textOf(labels, isQuery) {
  const isLong = labels.length > 256, areWords = labels.some((label) => [...label.trim()].length > 1);
  const isWords = areWords && !isLong;
  const isApart = areWords && isLong && !labels.some((label) => /^\s/.test(label)); // tokens without blanks need separators for line breaks
  const box = make("div", { className: `text${isLong ? " long" : ""}${isWords ? " words" : ""}` });
  const spans = [];
  labels.forEach((label, i) => {
    const isMark = /^([␣⏎␍⇥]+|<.*>)$/.test(label);
    const inner = label.trimStart() || label;
    if (isApart || (!isWords && inner !== label)) box.append(" "); // the blank before a word is not shaded
    const span = make("span", { className: `token${isMark ? " mark" : ""}`, textContent: inner });
    span.dataset.at = i;
    if (isQuery) Object.assign(span, { tabIndex: -1, role: "option" });
    spans.push(span);
    box.append(span);
    if (label.includes("⏎")) box.append(make("br"));
    else if (isMark) box.append(make("wbr")); // characters break at blanks
  });
  if (isQuery) box.setAttribute("role", "listbox");
  return { box, spans };
}

class TokenView {
  constructor(box, context) {
    Object.assign(this, context);
    this.warm = [];
    const isOne = this.attentionMap.kind !== "cross";
    const queries = textOf(this.rows, true), keys = isOne && sameText(this.rows, this.columns) ? queries : textOf(this.columns, false);
    this.queries = queries.spans;
    this.keys = keys.spans;
    queries.box.classList.add("query");
    queries.box.setAttribute("aria-label", "Queries: select a token to see its attention");
    const part = (title, text) => make("div", { className: "tokens" }, make("h3", { textContent: title }), text.box);
    if (keys === queries) box.replaceChildren(part("Select a token; its keys are shaded by weight", queries));
    else box.replaceChildren(part("Queries: select a token", queries), part("Keys, shaded by weight", keys));
    this.listen(queries.box);
    this.shade(this.row);
    const chosen = this.queries[this.row];
    if (queries.box.scrollHeight > queries.box.clientHeight) queries.box.scrollTop = chosen.offsetTop - queries.box.offsetTop - queries.box.clientHeight / 2;
  }

  listen(box) {
    const at = (event) => (event.target.dataset?.at === undefined ? null : Number(event.target.dataset.at));
    box.addEventListener("pointerover", (event) => { if (at(event) !== null) this.preview(at(event)); });
    box.addEventListener("pointerleave", () => this.preview(null));
    box.addEventListener("click", (event) => { if (at(event) !== null) this.choose(at(event)); });
    box.addEventListener("focusin", (event) => { if (at(event) !== null) this.preview(at(event)); });
    box.addEventListener("keydown", (event) => {
      const index = at(event), steps = { ArrowLeft: -1, ArrowRight: 1, Home: -index, End: this.queries.length - 1 - index };
      if (index === null) return;
      if (event.key in steps) this.queries[Math.max(0, Math.min(this.queries.length - 1, index + steps[event.key]))].focus();
      else if (event.key === "Enter" || event.key === " ") this.choose(index);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  take(context) {
    Object.assign(this, context);
    this.shade(this.row);
  }

  shade(row, column = null) {
    for (const span of this.warm) {
      span.classList.remove("warm", "chosen", "pointed");
      span.removeAttribute("title");
      span.style.removeProperty("background-color");
      span.style.removeProperty("color");
    }
    this.warm = [];
    for (const span of this.queries) if (span.tabIndex === 0) span.tabIndex = -1;
    this.queries[row ?? 0]?.setAttribute("tabindex", "0"); // Tab focuses the selected token; arrow keys move from it
    if (row === null) return;
    const best = this.matrix.best(row, 256), most = Math.sqrt(best[0]?.weight || 1);
    for (const { key, weight } of best) {
      const span = this.keys[key], share = Math.sqrt(weight) / Math.max(most, 0.4);
      if (share < 0.04) break;
      span.classList.add("warm");
      Object.assign(span.style, shadeOf(share));
      span.title = formatWeight(weight);
      this.warm.push(span);
    }
    for (const span of this.queries) if (span.getAttribute("aria-selected") === "true") span.setAttribute("aria-selected", "false");
    this.queries[row].classList.add("chosen");
    this.queries[row].setAttribute("aria-selected", "true");
    this.warm.push(this.queries[row]);
    if (column === null) return;
    this.keys[column].classList.add("pointed");
    this.warm.push(this.keys[column]);
  }
}

// View of a short report: tokens and matrix, with a shared selection.
class ShortView {
  constructor(box, context) {
    const above = make("div"), below = make("div", { className: "below" });
    box.replaceChildren(above, below);
    this.tokens = new TokenView(above, context);
    this.grid = new MatrixView(below, context);
  }

  get rows() { return this.tokens.rows; }
  get columns() { return this.tokens.columns; }

  take(context) {
    this.tokens.take(context);
    this.grid.take(context);
  }

  shade(row, column = null) {
    this.tokens.shade(row, column);
    this.grid.shade(row, column);
  }
}

const sameText = (a, b) => a === b || (a.length === b.length && a.every((token, i) => token === b[i]));

const SVG = "http://www.w3.org/2000/svg";

// One hue per head, of similar lightness.
const headColor = (head, n) => `hsl(${Math.round((360 * head) / n)} 75% ${isDark.matches ? 66 : head % 2 ? 38 : 48}%)`;

function colorKey(n, note) {
  const keys = Array.from({ length: n }, (_, head) => {
    const key = make("span", { className: "color", textContent: `head ${head}` });
    key.style.setProperty("--color", headColor(head, n));
    return key;
  });
  return make("span", { className: "colors" }, ...keys, ...(note ? [make("span", { textContent: note })] : []));
}

class LineView {
  static MAX_TOKENS = 64; // per side, up to which all are drawn
  static NEAR = 25; // queries drawn of a longer report
  static KEYS = 36; // maximum number of keys drawn of a longer report

  constructor(box, context) {
    Object.assign(this, context, { box: make("div") });
    box.replaceChildren(this.box);
    // On the box, because the drawing is replaced while the pointer is over it.
    this.box.addEventListener("pointerleave", () => { this.row = null; this.preview(null); });
    this.shade(this.row);
  }

  take(context) {
    Object.assign(this, context);
    this.shade(this.row);
  }

  // Return the queries and keys to draw: all of a short report, otherwise the queries near the selected one and their
  // keys with the largest weights.
  visibleTokens(row) {
    const T = this.rows.length, S = this.columns.length, all = (length) => Array.from({ length }, (_, i) => i);
    if (Math.max(T, S) <= LineView.MAX_TOKENS) return [all(T), all(S), ""];
    const near = Math.min(T, LineView.NEAR), first = Math.max(0, Math.min(T - near, row - (near >> 1)));
    const queries = all(near).map((i) => first + i), sums = new Map();
    for (const i of queries) {
      for (const { key, weight } of this.matrix.best(i, 8)) sums.set(key, (sums.get(key) || 0) + weight * (i === row ? 100 : 1));
    }
    const keys = [...sums].sort((a, b) => b[1] - a[1]).slice(0, LineView.KEYS).map(([key]) => key).sort((a, b) => a - b);
    return [queries, keys, `${near} queries around the selected one, and the ${keys.length} keys with the largest weights.`];
  }

  shade(row, column = null) {
    const [queries, keys, note] = this.visibleTokens(row ?? 0), step = 24, high = Math.max(queries.length, keys.length) * step + 8;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "lines");
    svg.setAttribute("viewBox", `0 0 640 ${high}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Lines from each query on the left to its keys with the largest weights on the right");
    const layout = (indices) => new Map(indices.map((i, n) => [i, 4 + (n + 0.5) * step + (high - 8 - indices.length * step) / 2]));
    const left = layout(queries), right = layout(keys), linked = new Set(), isLong = note !== "";
    const heads = this.heads ?? [this.matrix]; // with all heads, each has its own color
    heads.forEach((matrix, head) => {
      for (const [i, from] of left) {
        for (const { key, weight } of matrix.best(i, 8)) {
          if (weight < (isLong ? 0.01 : 0.03) || !right.has(key)) continue;
          if (i === row) linked.add(key);
          const shift = heads.length > 1 ? (14 * (head + 0.5)) / heads.length - 7 : 0; // so that heads do not overlap
          const line = this.line(from + shift, right.get(key) + shift, weight, i === row, row !== null);
          if (heads.length > 1) Object.assign(line.style, { stroke: headColor(head, heads.length), strokeWidth: 0.75 + 1.5 * weight });
          svg.append(line);
        }
      }
    });
    const name = (labels, i) => (isLong ? `${labels[i].trim()} ${i}` : labels[i]);
    for (const [i, y] of left) svg.append(this.label(name(this.rows, i), 190, y, "end", i, i === row ? "chosen" : ""));
    for (const [j, y] of right) svg.append(this.label(name(this.columns, j), 450, y, "start", null, row === null || linked.has(j) ? "" : "off"));
    this.box.replaceChildren(svg);
    this.note(heads.length > 1 ? colorKey(heads.length, note) : note);
  }

  line(from, to, weight, isChosen, isDim) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", `M200 ${from} C 310 ${from}, 330 ${to}, 440 ${to}`);
    path.setAttribute("stroke-width", (0.75 + 4 * weight).toFixed(2));
    path.setAttribute("stroke-opacity", (isChosen ? 0.3 + 0.7 * weight : (isDim ? 0.4 : 0.85) * Math.sqrt(weight)).toFixed(3));
    if (isChosen) path.setAttribute("class", "chosen");
    return path;
  }

  label(text, x, y, anchor, row, kind) {
    const label = document.createElementNS(SVG, "text");
    for (const [name, value] of Object.entries({ x, y, "text-anchor": anchor, "dominant-baseline": "central", class: kind })) {
      label.setAttribute(name, value);
    }
    label.textContent = text.trim().length > 24 ? `${text.trim().slice(0, 23)}…` : text.trim() || text;
    if (row !== null) {
      label.addEventListener("pointerenter", () => { if (this.row !== row) { this.row = row; this.preview(row); } });
      label.addEventListener("click", () => this.choose(row));
    }
    return label;
  }
}

class PatchView {
  constructor(box, context) {
    Object.assign(this, context);
    const { height, width } = data.image, side = width > 2 * height ? 960 : 480;
    this.canvas = make("canvas", { width: side, height: Math.round((side * height) / width), tabIndex: 0, role: "img" });
    const isSound = this.attentionMap.grid[0] === 1, [what, part] = isSound ? ["Mel spectrogram", "frame"] : ["Input image", "patch"];
    this.canvas.setAttribute("aria-label", `${what}, highlighted by the weights of the selected ${part}. Arrow keys select a ${part}.`);
    const plain = make("canvas", { width: this.canvas.width, height: this.canvas.height, role: "img", className: "plain" });
    plain.setAttribute("aria-label", `${what}.`);
    const pen = plain.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(photograph(), 0, 0, plain.width, plain.height);
    const titled = (title, canvas) => make("figure", {}, canvas, make("figcaption", { textContent: title }));
    box.replaceChildren(make("div", { className: isSound ? "patches sound" : "patches" }, titled(what, plain), titled(`Attention of the selected ${part}`, this.canvas)), ...(data.sound ? timeLine(data.sound, box.clientWidth - 40) : []));
    this.listen();
    this.shade(this.row);
  }

  take(context) {
    Object.assign(this, context);
    this.shade(this.row);
  }

  get patches() { return this.attentionMap.grid; }
  get extra() { return this.rows.length - this.patches[0] * this.patches[1]; } // tokens before the patches, such as [CLS]

  listen() {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect(), [rows, columns] = this.patches;
      const i = Math.floor(((event.clientY - box.top) / box.height) * rows), j = Math.floor(((event.clientX - box.left) / box.width) * columns);
      return this.extra + Math.max(0, Math.min(rows - 1, i)) * columns + Math.max(0, Math.min(columns - 1, j));
    };
    this.canvas.addEventListener("pointermove", (event) => this.preview(at(event)));
    this.canvas.addEventListener("pointerleave", () => this.preview(null));
    this.canvas.addEventListener("click", (event) => this.choose(at(event)));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.patches[1], ArrowDown: this.patches[1] }[event.key];
      if (!step) return;
      const next = (this.row ?? this.extra) + step;
      if (next >= 0 && next < this.rows.length) this.choose(next);
      event.preventDefault();
      event.stopPropagation();
    });
  }

  shade(row) {
    this.row = row ?? this.row;
    const pen = this.canvas.getContext("2d"), { width: wide, height: high } = this.canvas, [rows, columns] = this.patches;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(photograph(), 0, 0, wide, high);
    if (row === null) return;
    const best = this.matrix.best(row, this.rows.length), most = best[0]?.weight || 1;
    const before = best.filter(({ key }) => key < this.extra).reduce((sum, { weight }) => sum + weight, 0);
    this.note(make("span", { className: "scale" }, "0", make("span", { className: "glow" }), `${formatWeight(most)} of its attention${before >= 0.005 ? `; class token: ${formatWeight(before)}` : ""}`));
    const style = getComputedStyle(document.documentElement), tall = high / rows, broad = wide / columns;
    // Darken the image, then highlight patches by weight.
    pen.fillStyle = "rgb(10 14 20 / 0.35)";
    pen.fillRect(0, 0, wide, high);
    for (const { key, weight } of best) {
      if (key < this.extra) continue;
      const [i, j] = [Math.floor((key - this.extra) / columns), (key - this.extra) % columns];
      pen.fillStyle = `rgb(255 176 32 / ${(0.72 * Math.sqrt(weight / most)).toFixed(3)})`;
      pen.fillRect(j * broad, i * tall, broad, tall);
    }
    if (row >= this.extra) {
      const [i, j] = [Math.floor((row - this.extra) / columns), (row - this.extra) % columns];
      pen.strokeStyle = "#ffffff";
      pen.lineWidth = 5;
      pen.strokeRect(j * broad + 1, i * tall + 1, broad - 2, tall - 2);
      pen.strokeStyle = style.getPropertyValue("--accent");
      pen.lineWidth = 2.5;
      pen.strokeRect(j * broad + 1, i * tall + 1, broad - 2, tall - 2);
    }
  }
}

// Return the time axis below a spectrogram, with the recognized symbols, and a player of the recording if the page contains it.
function timeLine({ wav, start, end, symbols }, room) {
  const W = Math.max(240, Math.min(960, room)), H = 40, x = (time) => ((time - start) / (end - start)) * W, step = [0.1, 0.2, 0.5, 1, 2, 5, 10].find((size) => (end - start) / size <= W / 70) ?? 30;
  const part = (tag, attributes, text = "") => { const element = document.createElementNS(SVG, tag); for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value); element.textContent = text; return element; };
  const svg = part("svg", { class: "time-line", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": symbols.map(({ text, end: at }) => `${text} ended at ${at.toFixed(2)} s`).join(", ") });
  for (let t = Math.ceil(start / step) * step; t <= end; t += step) svg.append(part("path", { d: `M${x(t)} 22v4` }), part("text", { x: Math.min(W - 14, Math.max(10, x(t))), y: 38, "text-anchor": "middle" }, `${Number(t.toFixed(1))} s`));
  for (const { text, end: at } of symbols) svg.append(part("path", { class: "symbol", d: `M${x(at)} 0v22` }), part("text", { class: "symbol", x: x(at) - 4, y: 14, "text-anchor": "end" }, text));
  if (!wav) return [svg];
  const player = make("audio", { controls: true, src: `data:audio/wav;base64,${wav}` }), cursor = part("path", { class: "cursor", d: "M0 0v22" });
  svg.append(cursor);
  player.ontimeupdate = () => cursor.setAttribute("transform", `translate(${x(player.currentTime)} 0)`);
  svg.addEventListener("click", (event) => { const frame = svg.getBoundingClientRect(); player.currentTime = Math.max(0, start + ((event.clientX - frame.left) / frame.width) * (end - start)); player.play(); });
  return [svg, player];
}

let photo = null;

// Return a canvas of the gray input image, at its resolution.
function photograph() {
  if (photo) return photo;
  const { width, height, pixels } = data.image, gray = atob(pixels);
  photo = Object.assign(document.createElement("canvas"), { width, height });
  const pen = photo.getContext("2d"), image = pen.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const value = gray.charCodeAt(i);
    image.data.set([value, value, value, 255], 4 * i);
  }
  pen.putImageData(image, 0, 0);
  return photo;
}
