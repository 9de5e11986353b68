// Matrix view: queries down, keys across. Long matrices are drawn pooled, and cell by cell after zooming in.

const LABEL = 9.5; // pixels per label
const FONT = "12px Inter, ui-sans-serif, system-ui, 'Liberation Sans', sans-serif";

class MatrixView {
  constructor(box, context) {
    Object.assign(this, context, { zoom: 1, x: 0, y: 0, cursor: null, ceilings: {}, pool: context.pool || "largest" });
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.canvas.setAttribute("aria-label", this.description());
    this.tip = make("div", { className: "tip", hidden: true });
    this.frame = make("div", { className: "matrix" }, this.canvas, this.tip);
    box.replaceChildren(this.frame);
    this.measure(box);
    this.listen();
    this.draw();
  }

  take(context) {
    Object.assign(this, context, { ceilings: {} });
    this.draw();
    this.showTooltip();
  }

  description() {
    return `Matrix of attention weights: ${this.rows.length} queries down, ${this.columns.length} keys across. ` +
      "Arrow keys move, plus and minus zoom. The table lists the weights of the selected row.";
  }

  measure(box) {
    const pen = this.canvas.getContext("2d");
    pen.font = FONT;
    this.letters = Math.max(0, ...this.columns.map((label) => [...label.trim()].length)) <= 2; // then labels are upright
    const longest = (labels) => Math.min(120, 10 + Math.max(0, ...labels.map((label) => pen.measureText(label.trim()).width)));
    const beyond = this.letters ? 8 : Math.min(50, 0.62 * longest(this.columns.slice(-3))); // overhang of the last rotated labels
    this.margins(box, longest(this.rows), this.letters ? 20 : 8 + longest(this.columns) * 0.8, beyond);
    // If labels are thinned out, they include their positions and need more space.
    if (this.cell < LABEL) this.margins(box, 92, 72, Math.min(50, 0.62 * (20 + longest(this.columns))));
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(this.width * ratio), height: Math.round(this.height * ratio) });
    Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${this.height}px` });
    this.ratio = ratio;
  }

  margins(box, left, above, right) {
    const T = this.rows.length, S = this.columns.length;
    const { paddingLeft, paddingRight } = getComputedStyle(box), boxWidth = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    const wide = Math.max(160, boxWidth - 2 - left - right), high = Math.max(320, Math.min(680, innerHeight - 240));
    this.cell = Math.min(wide / S, high / T, this.largest || 56);
    // Enlarge small and elongated matrices to fill the frame.
    const broad = this.largest ? this.cell : Math.min(wide / S, 1.75 * this.cell);
    const across = Math.min(wide, Math.max(broad * S, S < T ? Math.min(wide, S * 12, 200) : 0));
    const down = Math.max(this.cell * T, Math.min(60, 24 * T));
    Object.assign(this, { left, above, across, down, width: left + across + right, height: above + down + 4 });
  }

  get grid() { return this; }
  get perColumn() { return (this.across * this.zoom) / this.columns.length; }
  get perRow() { return (this.down * this.zoom) / this.rows.length; }

  // Number of times the matrix is downsampled by 2, so that a cell is about one pixel.
  get depth() { return Math.max(0, Math.floor(Math.log2(1 / (Math.min(this.perColumn, this.perRow) * this.ratio)) + 0.5)); }
  get isPooled() { return this.depth > 0 || (this.matrix instanceof Overview && this.perRow < 2); }

  draw() {
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.above, this.across, this.down);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    this.cells(pen);
    pen.restore();
    pen.strokeStyle = this.color("--line");
    pen.strokeRect(this.left - 0.5, this.above - 0.5, this.across + 1, this.down + 1);
    this.mark(pen);
    this.labels(pen);
    this.frame.classList.toggle("zoomed", this.zoom > 1);
  }

  cells(pen) {
    const isTiled = this.matrix instanceof Overview, isClose = isTiled && !this.isPooled;
    const level = this.matrix.level(this.depth, isClose ? "mean" : this.pool);
    const [sizeY, sizeX] = isTiled ? this.matrix.tile : [2 ** this.depth, 2 ** this.depth]; // cells per cell of the level
    // The color scale depends on the whole level, so that it does not change while panning.
    const scale = isTiled ? this.matrix.level(0, this.pool) : level;
    const high = this.ceilings[`${isTiled ? 0 : this.depth} ${this.pool}`] ??= ceiling(scale.codes, this.matrix.top);
    this.high = high;
    // Draw only the visible part.
    const top = Math.max(0, Math.floor(this.y / sizeY)), left = Math.max(0, Math.floor(this.x / sizeX));
    const rows = Math.min(level.rows, Math.ceil((this.y + this.rows.length / this.zoom) / sizeY)) - top;
    const wide = Math.min(level.columns, Math.ceil((this.x + this.columns.length / this.zoom) / sizeX)) - left;
    const image = renderCells(level, [top, left, rows, wide], high, this.palette);
    pen.drawImage(image, this.atColumn(left * sizeX), this.atRow(top * sizeY),
      wide * sizeX * this.perColumn, rows * sizeY * this.perRow);
    if (isClose) this.drawStoredCells(pen, high);
  }

  // Draw the stored cells of a long layer over the mean of their tiles.
  drawStoredCells(pen, high) {
    const last = Math.min(this.rows.length, Math.ceil(this.y + this.rows.length / this.zoom));
    for (let i = Math.max(0, Math.floor(this.y)); i < last; i++) {
      for (const { key, weight } of this.matrix.best(i, this.matrix.keysPerRow)) {
        const color = this.palette[Math.min(255, Math.round((Math.sqrt(weight) * 255 * 255) / high))];
        pen.fillStyle = `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
        pen.fillRect(this.atColumn(key), this.atRow(i), this.perColumn, this.perRow);
      }
    }
  }

  atColumn(j) { return this.left + (j - this.x) * this.perColumn; }
  atRow(i) { return this.above + (i - this.y) * this.perRow; }
  color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name); }

  // Draw a frame around the selected row and around the cell under the pointer.
  mark(pen) {
    pen.save();
    pen.beginPath();
    pen.rect(this.left - 2, this.above - 2, this.across + 4, this.down + 4);
    pen.clip();
    pen.lineWidth = 1.5;
    if (this.row !== null) {
      pen.strokeStyle = this.color("--accent");
      pen.strokeRect(this.left - 1, this.atRow(this.row) - 0.5, this.across + 2, Math.max(2, this.perRow) + 1);
    }
    if (this.column !== null && this.column !== undefined) {
      pen.strokeStyle = this.color("--accent");
      pen.strokeRect(this.atColumn(this.column) - 0.5, this.above - 1, Math.max(2, this.perColumn) + 1, this.down + 2);
    }
    if (this.cursor) {
      pen.strokeStyle = this.color("--ink");
      const [i, j] = this.cursor;
      pen.strokeRect(this.atColumn(j) - 0.5, this.atRow(i) - 0.5, Math.max(3, this.perColumn) + 1, Math.max(3, this.perRow) + 1);
    }
    pen.restore();
  }

  labels(pen) {
    pen.font = FONT;
    pen.textBaseline = "middle";
    const soft = this.color("--soft"), ink = this.color("--ink"), accent = this.color("--accent");
    const [row, column] = this.cursor || [null, null];
    pen.textAlign = "right";
    for (const i of this.labelIndices(this.rows.length, this.y, this.perRow, this.down)) {
      pen.fillStyle = i === this.row ? accent : i === row ? ink : soft;
      pen.fillText(this.clipped(pen, this.rows, i, this.perRow, this.left - 10), this.left - 8, this.atRow(i + 0.5));
    }
    pen.textAlign = "left";
    const isUpright = this.letters && this.perColumn >= LABEL;
    for (const j of this.labelIndices(this.columns.length, this.x, this.perColumn, this.across)) {
      pen.fillStyle = j === this.column ? accent : j === column ? ink : soft;
      pen.save();
      pen.translate(this.atColumn(j + 0.5), this.above - (this.letters ? 10 : 6));
      if (isUpright) pen.textAlign = "center";
      else pen.rotate(-0.9);
      pen.fillText(this.clipped(pen, this.columns, j, this.perColumn, isUpright ? 30 : (this.above - 8) / 0.78), 0, 0);
      pen.restore();
    }
  }

  // Return the indices of the labels to draw: all if they fit, otherwise every n-th.
  labelIndices(length, start, size, room) {
    let step = 1;
    while (step * size < (size >= LABEL ? LABEL : 44)) step *= String(step)[0] === "2" ? 2.5 : 2; // 1 2 5 10 20 50 …
    const first = Math.ceil(start / step) * step, indices = [];
    for (let i = first; i < length && (i - start) * size < room - Math.min(size, 8) / 2; i += step) indices.push(i);
    return indices;
  }

  clipped(pen, labels, i, size, room) {
    const name = labels[i].trim() || labels[i];
    let text = size >= LABEL ? name : `${name} ${i}`;
    if (pen.measureText(text).width <= room) return text;
    while (text.length > 1 && pen.measureText(`${text}…`).width > room) text = text.slice(0, -1);
    return `${text}…`;
  }

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    canvas.addEventListener("pointermove", (event) => {
      if (dragged) {
        this.move(dragged.x - (event.offsetX - dragged.at[0]) / this.perColumn, dragged.y - (event.offsetY - dragged.at[1]) / this.perRow);
        return;
      }
      this.point(this.cellAt(event));
    });
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (this.zoom > 1) dragged = { at: [event.offsetX, event.offsetY], x: this.x, y: this.y };
    });
    addEventListener("pointerup", () => { dragged = null; }, { signal: this.ended });
    canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) this.choose(cell[0]);
    });
    canvas.addEventListener("dblclick", (event) => this.zoomBy(2, this.cellAt(event)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // without a modifier the page scrolls
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.25 : 0.8, this.cellAt(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 0 };
    if (event.key in steps) {
      const [i, j] = this.cursor || [this.row ?? 0, this.row === null ? -1 : this.matrix.best(this.row, 1)[0]?.key ?? 0];
      const [di, dj] = steps[event.key], clamp = (n, length) => Math.max(0, Math.min(length - 1, n));
      this.point([clamp(i + di, this.rows.length), clamp(j + dj, this.columns.length)]);
    } else if (event.key in zooms) {
      if (zooms[event.key]) this.zoomBy(zooms[event.key], this.cursor || [this.row ?? 0, 0]);
      else this.zoomBy(0, null);
    } else if (event.key === "Enter" && this.cursor) {
      this.choose(this.cursor[0]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  cellAt(event) {
    const j = Math.floor(this.x + (event.offsetX - this.left) / this.perColumn);
    const i = Math.floor(this.y + (event.offsetY - this.above) / this.perRow);
    const isInside = event.offsetX >= this.left && event.offsetY >= this.above && i < this.rows.length && j < this.columns.length;
    return isInside && i >= 0 && j >= 0 ? [i, j] : null;
  }

  point(cell) {
    if (String(cell) === String(this.cursor)) return;
    this.cursor = cell;
    this.preview(cell ? cell[0] : null, cell ? cell[1] : null, this);
    this.draw();
    this.showTooltip();
  }

  // Show the weight under the pointer in a tooltip.
  showTooltip() {
    this.tip.hidden = !this.cursor;
    if (!this.cursor) return;
    const [i, j] = this.cursor, name = (labels, at) => labels[at].trim() || labels[at];
    this.tip.textContent = `${name(this.rows, i)} → ${name(this.columns, j)}  ${formatWeight(this.matrix.weight(i, j))}`;
    const x = this.atColumn(j + 1) + 8, isLeft = x + this.tip.offsetWidth > this.width;
    this.tip.style.left = `${isLeft ? Math.max(0, this.atColumn(j) - 8 - this.tip.offsetWidth) : x}px`;
    this.tip.style.top = `${Math.max(0, this.atRow(i + 0.5) - this.tip.offsetHeight / 2)}px`;
  }

  // Zoom by a factor (0 resets) with one cell at a fixed place.
  zoomBy(factor, cell) {
    const before = this.zoom, most = Math.max(1, 28 / (this.across / this.columns.length), 28 / (this.down / this.rows.length));
    this.zoom = factor ? Math.max(1, Math.min(most, before * factor)) : 1;
    const [i, j] = cell || [0, 0];
    this.move(j - ((j - this.x) * before) / this.zoom, i - ((i - this.y) * before) / this.zoom);
    this.changed();
  }

  move(x, y) {
    const within = (at, length) => Math.max(0, Math.min(length - length / this.zoom, at));
    this.x = within(x, this.columns.length);
    this.y = within(y, this.rows.length);
    this.draw();
  }

  shade(row, column = null) {
    this.row = row;
    this.column = column;
    this.draw();
  }
}
