// Below the main view: measures of all heads, attention rollout, and the residual stream.

function gauge(share) {
  const bar = make("span");
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return make("td", { className: "gauge" }, bar);
}

class Measures {
  static COLUMNS = [
    ["stack", (head) => head.title.replace(/ self-attention$|-attention$/, "")],
    ["layer", (head) => head.layer],
    ["head", (head) => head.head],
    ["pattern", (head) => head.label],
    ["score", (head) => head.score],
    ["entropy", (head) => head.entropy],
    ["distance", (head) => head.distance],
  ];

  constructor(select) {
    this.select = select;
    this.heads = data.maps.flatMap((map, number) => map.summary.map((head, h) =>
      ({ ...head, number, head: h, layer: map.layer, title: map.title })));
    this.by = null;
    this.body = make("tbody");
    this.head = make("tr");
    const several = new Set(this.heads.map((head) => head.title)).size > 1;
    this.columns = Measures.COLUMNS.filter(([name]) => several || name !== "stack");
    for (const [name] of this.columns) {
      const button = make("button", { type: "button", textContent: name, title: `Sort by ${name}` });
      button.addEventListener("click", () => this.sort(name));
      this.head.append(make("th", { scope: "col" }, button));
    }
    const table = make("table", { className: "measures" }, make("thead", {}, this.head), this.body);
    table.setAttribute("aria-label", "Measures of every head");
    this.box = make("div", {}, make("h2", { textContent: "All heads" }),
      make("p", { className: "note", textContent: "Entropy (nats) and distance (tokens, or patches of an image) are means over the queries. " +
        "A pattern's score is the share of weight on its keys; a head whose scores are all below 0.5 is mixed." }),
      make("div", { className: "scroll" }, table));
    this.fill();
  }

  sort(name) {
    this.down = this.by === name ? !this.down : !["stack", "layer", "head", "pattern"].includes(name);
    this.by = name;
    const key = Measures.COLUMNS.find(([column]) => column === name)[1], sign = this.down ? -1 : 1;
    this.heads.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    this.fill();
  }

  fill() {
    [...this.head.children].forEach((cell, i) => {
      if (this.columns[i][0] === this.by) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...this.heads.map((head) => this.line(head)));
    this.current(this.selected);
  }

  line(head) {
    const row = make("tr");
    for (const [name, key] of this.columns) {
      const text = ["score", "entropy", "distance"].includes(name) ? key(head).toFixed(2) : String(key(head));
      // The row takes clicks; its button takes the keyboard.
      row.append(make("td", { className: "number" }, name === "head" ? make("button", { type: "button", textContent: text }) : text));
    }
    row.dataset.at = `${head.number}/${head.head}`;
    row.addEventListener("click", () => this.select(head.number, head.head));
    return row;
  }

  current(selected) {
    this.selected = selected;
    for (const row of this.body.children) row.setAttribute("aria-current", String(row.dataset.at === selected));
  }
}

// Attention rollout of one stack, over all its layers.
function rolloutBox() {
  const box = make("div"), view = make("div"), choices = make("div", { className: "choices", role: "group" });
  choices.setAttribute("aria-label", "Stack");
  const select = async (number) => {
    const { rows, data: text } = data.rollouts[number], labels = tokens(rows);
    [...choices.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
    const matrix = new FullMatrix(labels.length, labels.length, 8, await unpack(text, 8));
    if (signal.aborted) return;
    box.note = make("p", { className: "note", textContent: " " });
    const spread = rowSpread(matrix, labels.length), collapsed = spread < 0.15;
    const warning = make("p", { className: "note warning", textContent: collapsed ? `The rollout has collapsed: its rows differ by only ${(100 * spread).toFixed(0)} % of their weight on average, so it does not show which tokens an output depends on.` : "" });
    view.replaceChildren(make("div"), box.note, warning);
    new MatrixView(view.firstChild, {
      matrix, rows: labels, columns: labels, row: null, palette: palette(), largest: 24, choose() {}, changed() {},
      preview(i, j) { box.note.textContent = i === null ? " " : `${labels[i]} ← ${labels[j]}  ${formatWeight(matrix.weight(i, j))}`; },
    });
  };
  data.rollouts.forEach(({ title }, number) => {
    const button = make("button", { type: "button", textContent: title });
    button.addEventListener("click", () => select(number));
    choices.append(button);
  });
  box.append(make("h2", { textContent: "Rollout" }),
    make("p", { className: "note", textContent: "How much of each input position (across) reaches each output position (down) through all " +
      "layers: each layer counts half for the residual connection and half for the mean of its heads." }));
  if (data.rollouts.length > 1) box.append(choices);
  view.style.marginTop = "0.75rem";
  box.append(view);
  return { box, draw: () => select(Math.max(0, [...choices.children].findIndex((button) => button.getAttribute("aria-pressed") === "true"))) };
}

// Return the mean total variation between the rows of the second half of a matrix and their mean: 0 if all are equal.
function rowSpread(matrix, n) {
  const first = Math.floor(n / 2), rows = n - first, mean = new Float64Array(n);
  if (rows < 2) return 1;
  for (let i = first; i < n; i++) for (let j = 0; j < n; j++) mean[j] += matrix.weight(i, j) / rows;
  let sum = 0;
  for (let i = first; i < n; i++) for (let j = 0; j < n; j++) sum += Math.abs(matrix.weight(i, j) - mean[j]) / 2 / rows;
  return sum;
}

// Norm of the residual stream after each block: mean and range over the tokens. The first token is apart, because its
// norm is often far larger; a wide range of norms has a logarithmic axis.
function normsBox() {
  const box = make("div"), canvas = make("canvas", { className: "plot", role: "img" }), rows = data.norms;
  const parts = rows.map(({ path, values }) => {
    const rest = values.length > 2 ? values.slice(1) : values;
    return { path, first: values[0], mean: rest.reduce((a, b) => a + b, 0) / rest.length, low: Math.min(...rest), top: Math.max(...rest), hasFirst: values.length > 2 };
  });
  const all = parts.flatMap(({ first, low, top, hasFirst }) => (hasFirst ? [first, low, top] : [low, top])), most = Math.max(...all), least = Math.max(Math.min(...all), most * 1e-6);
  const isLog = most / least > 12;
  canvas.setAttribute("aria-label", parts.map(({ path, mean, first }) => `${path}: mean ${mean.toPrecision(3)}, first token ${first.toPrecision(3)}`).join("; "));
  box.append(make("h2", { textContent: "Residual stream" }),
    make("p", { className: "note", textContent: `Norm of the vectors after each block: mean (dot) and range (bar) over the tokens${parts[0].hasFirst ? ", and the first token (ring)" : ""}${isLog ? "; logarithmic axis" : ""}.` }), canvas);
  const draw = () => {
    const wide = Math.min(560, box.clientWidth || 560), step = rows.length > 16 ? 16 : 24, high = rows.length * step + 26, ratio = devicePixelRatio || 1;
    Object.assign(canvas, { width: wide * ratio, height: high * ratio });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name);
    pen.scale(ratio, ratio);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const names = parts.map(({ path }) => (path.length > 28 ? `…${path.slice(-27)}` : path));
    const left = 12 + Math.max(...names.map((name) => pen.measureText(name).width)), right = wide - 60;
    const from = isLog ? Math.log10(least) : 0, to = isLog ? Math.log10(most) : most;
    const x = (value) => left + (((isLog ? Math.log10(Math.max(value, least)) : value) - from) / (to - from || 1)) * (right - left);
    parts.forEach(({ mean, low, top, first, hasFirst }, i) => {
      const y = 8 + i * step + step / 2;
      pen.fillStyle = color("--soft");
      pen.textAlign = "right";
      pen.fillText(names[i], left - 12, y);
      pen.strokeStyle = color("--line");
      pen.beginPath();
      pen.moveTo(left, y);
      pen.lineTo(right, y);
      pen.stroke();
      pen.fillStyle = color("--heat");
      pen.globalAlpha = 0.25;
      pen.fillRect(x(low), y - 5, Math.max(1, x(top) - x(low)), 10);
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.arc(x(mean), y, 3.5, 0, 7);
      pen.fill();
      if (hasFirst) {
        pen.strokeStyle = color("--accent");
        pen.beginPath();
        pen.arc(x(first), y, 3.5, 0, 7);
        pen.stroke();
      }
      pen.fillStyle = color("--ink");
      pen.fillText(mean.toPrecision(3), wide - 6, y);
    });
    pen.fillStyle = color("--soft");
    pen.textAlign = "center";
    const ticks = isLog ? Array.from({ length: Math.floor(to) - Math.ceil(from) + 1 }, (_, i) => 10 ** (Math.ceil(from) + i)) : [0, most];
    for (const tick of ticks) pen.fillText(tick.toLocaleString("en", { maximumSignificantDigits: 3 }), x(tick), high - 8);
  };
  return { box, draw };
}
