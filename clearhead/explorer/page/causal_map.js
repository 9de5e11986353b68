// The causal map: layers × heads, feed-forward networks and blocks, colored by the change that ablating each one makes.
// The layers are requested a few at a time, from the last one, so that the map of a deep model fills step by step.
import { heatGrid } from "./heat.js";
import { Latest, ask, choices, make } from "./tools.js";

// The rows of the map: one per attention layer, with the modules of its cells.
export function rowsOf(model) {
  const nHeads = Math.max(...model.layers.map((layer) => layer.n_heads));
  const columns = [...Array.from({ length: nHeads }, (_, head) => ({ label: String(head), title: `head ${head}` })), { label: "all", title: "the whole attention layer" }, { label: "MLP", title: "the feed-forward network" }, { label: "skip", title: "the block is skipped: its output is its input" }];
  const rows = model.layers.map(({ path, n_heads: n }) => {
    const isFirst = !path.endsWith("cross_attention"), block = path.replace(/\.[^.]+$/, "");
    const cells = Array.from({ length: nHeads }, (_, head) => (head < n ? { path, head } : null));
    return { path, label: path.replace(/(^|\.)blocks\./, "$1").replace(/\.attention$/, " self").replace(".cross_attention", " cross"), cells: [...cells, { path, head: null }, isFirst ? { path: `${block}.feed_forward`, head: null } : null, isFirst ? { path: block, head: null, isBlock: true } : null] };
  });
  return { rows, columns, nHeads };
}

export class CausalMap {
  constructor(pane, signal, { onClick, onShown = () => {}, measure = "logit", onMeasure = () => {} }) {
    Object.assign(this, { pane, onClick, onShown, measure, onMeasure, requests: new Latest(signal), key: "", to: "zero" });
    this.measures = choices("Color", [["logit", "Logit of the token"], ["kl", "Divergence of the output"]], measure, (name) => { this.measure = name; onMeasure(name); this.load(this.subject, this.step); });
    this.replacements = choices("Replace by", [["zero", "Zero"], ["mean", "Mean"]], "zero", (name) => { this.to = name; this.load(this.subject, this.step); });
  }

  // Compute the map of one output token, unless it is already shown.
  load(subject, step) {
    Object.assign(this, { subject, step });
    const key = JSON.stringify([subject.input, step, this.measure, this.to]);
    if (key === this.key) return;
    this.key = key;
    const { rows, columns, nHeads } = (this.shape = rowsOf(subject.model));
    this.values = rows.map(({ cells }) => cells.map((cell) => (cell ? null : undefined)));
    const written = subject.last.tokens[subject.last.n_prompt + step];
    this.target = written === undefined ? "the next token" : `“${written.trim() || written}”`;
    this.draw(columns);
    const pending = rows.map(({ path }) => path).reverse(), size = subject.model.parameters > 5e7 ? 1 : subject.model.parameters > 5e6 ? 3 : 8;
    this.requests.run(async (stop) => {
      while (pending.length) {
        const layers = pending.splice(0, size);
        const part = await ask("causal_map", { ...subject.input, step, layers, measure: this.measure, to: this.to }, { signal: stop });
        for (const row of part.rows) this.fill(rows.findIndex(({ path }) => path === row.path), row, nHeads);
        this.draw(columns, pending.length);
      }
    }, () => { document.documentElement.dataset.map = `${this.measure} ${this.target}`; }, (error) => { this.key = ""; this.pane.fail(error.message); }, 300);
  }

  fill(i, { heads, layer, feed_forward: feedForward, skip }, nHeads) {
    heads.forEach((value, head) => { this.values[i][head] = value; });
    this.values[i][nHeads] = layer;
    if (this.values[i][nHeads + 1] !== undefined) this.values[i][nHeads + 1] = feedForward ? feedForward.value : undefined;
    if (this.values[i][nHeads + 2] !== undefined) this.values[i][nHeads + 2] = skip ?? undefined;
  }

  draw(columns, nPending = this.shape.rows.length) {
    const { rows, nHeads } = this.shape, heads = this.values.flatMap((row) => row.slice(0, nHeads)).filter((value) => value !== null && value !== undefined);
    const largest = Math.max(0.05, ...heads.map(Math.abs)); // of the heads, whose effects are smaller than those of whole layers
    const what = this.measure === "logit" ? `change of the logit of ${this.target} when a part is replaced; orange parts speak for the token` : `divergence of the prediction of ${this.target}, in nats, when a part is replaced`;
    const grid = heatGrid({ caption: `${what}${nPending ? ` (${rows.length - nPending} of ${rows.length} layers computed …)` : "."} Columns: heads, the whole attention layer, the feed-forward network (MLP), and the block skipped.`, rows: rows.map(({ label, path }) => ({ label, title: path })), columns, values: this.values, largest, signed: this.measure === "logit", corner: "layer ↓ head →", className: rows.length > 16 ? "map-grid deep" : "map-grid",
      title: (i, j) => `${rows[i].cells[j].path}${rows[i].cells[j].head === null ? "" : `, head ${rows[i].cells[j].head}`}: ${this.values[i][j] === null ? "not computed yet" : this.values[i][j].toFixed(3)}`,
      onClick: (i, j) => this.onClick(rows[i].cells[j]) });
    const focus = document.activeElement?.dataset?.cell;
    this.grid = grid;
    this.pane.show(make("div", { className: "form tight map-options" }, this.measures, this.replacements), grid);
    rows.forEach(({ cells }, i) => cells.forEach((cell, j) => { if (cell) { const part = grid.cell(i, j).firstChild; part.dataset.cell = `${cell.path}/${cell.head}`; if (part.dataset.cell === focus) part.focus(); } }));
    this.onShown();
  }

  // Mark the cells for which `stateOf(cell)` returns {label, sign}.
  mark(stateOf) {
    if (!this.grid) return;
    this.shape.rows.forEach(({ cells }, i) => cells.forEach((cell, j) => {
      if (!cell) return;
      const td = this.grid.cell(i, j), found = stateOf(cell), part = td.firstChild;
      td.classList.toggle("edited", Boolean(found));
      part.setAttribute("aria-pressed", String(Boolean(found)));
      part.setAttribute("aria-label", `${cell.path}${cell.head === null ? "" : `, head ${cell.head}`}${found ? `: ${found.label}` : ""}`);
      td.dataset.sign = found?.sign ?? "";
    }));
  }
}
