// What every panel uses: elements, asking the server, and saving pictures.

// make("td", { className: "number" }, "0.5"): an element, its properties, its children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function draw(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function toggle(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value);
}

export class Refused extends Error {
  constructor(told, status) { super(told.error); Object.assign(this, told, { status }); }
}

// Ask the server. `onPart` and `onProgress` hear of what comes before the end; aborting stops the work there, too.
export async function ask(action, body, { signal, onPart, onProgress } = {}) {
  const answer = await fetch(`api/${action}`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Refused(await answer.json(), answer.status);
  let last = null;
  const hear = (line) => {
    const event = JSON.parse(line);
    if ("done" in event || "error" in event) last = event;
    if ("part" in event) onPart?.(event.part);
    if ("progress" in event) onProgress?.(event.progress);
  };
  if (onPart || onProgress) await byLine(answer.body.getReader(), hear);
  else (await answer.text()).trimEnd().split("\n").forEach(hear);
  if (!last) throw new Refused({ error: "the answer broke off: is the server still running?" });
  if (last.error) throw new Refused(last.error);
  return last.done;
}

async function byLine(reader, hear) {
  const decoder = new TextDecoder();
  let rest = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = decoder.decode(value, { stream: true }).split("\n");
    lines.forEach((line, i) => {
      rest.push(line);
      if (i === lines.length - 1) return;
      hear(rest.join(""));
      rest = [];
    });
  }
}

// Only the newest question counts: the one before is cancelled, also on the server. `wait` gathers quick changes.
export class Latest {
  constructor(signal) {
    this.ended = signal;
    signal.addEventListener("abort", () => this.stop());
  }

  stop() {
    clearTimeout(this.timer);
    this.going?.abort();
  }

  // What `act(signal)` gives goes to `show`; what it throws to `fail`, unless it is out of date.
  run(act, show, fail, wait = 0) {
    this.stop();
    if (this.ended.aborted) return;
    const mine = (this.going = new AbortController());
    this.timer = setTimeout(async () => {
      try {
        const found = await act(mine.signal);
        if (!mine.signal.aborted) show(found);
      } catch (error) {
        if (mine.signal.aborted) return;
        if (!(error instanceof Refused || error instanceof TypeError)) throw error;
        fail(error instanceof Refused ? error : new Refused({ error: "the server does not answer: is it still running?" }));
      }
    }, wait);
  }
}

export const status = (text) => { document.getElementById("status").textContent = text; };
export const progress = ({ completed, total, label }) => status(`${label} (${Math.round((100 * completed) / total)} %)`);
export const ready = (word) => { document.documentElement.dataset.ready = word; };

// ---------------------------------------------------------------------- fields

let fields = 0;

// A field with its label: field("Tokens", make("input", …)).
export function field(words, input, ...more) {
  input.id ||= `field-${++fields}`;
  return make("div", { className: "field" }, make("label", { htmlFor: input.id, textContent: words }), input, ...more);
}

// A slider with its number beside it, which can be typed as well. `steps` are the values it takes.
export function slider(words, steps, value, change) {
  const at = (number) => steps.reduce((best, step, i) => (Math.abs(step - number) < Math.abs(steps[best] - number) ? i : best), 0);
  const number = make("input", { type: "number", value, min: steps[0], step: "any", ariaLabel: words, className: "typed" });
  const range = make("input", { type: "range", min: 0, max: steps.length - 1, value: at(value), on: { input() {
    number.value = steps[range.value];
    change(steps[range.value]);
  } } });
  number.addEventListener("input", () => {
    const typed = Number(number.value);
    if (number.value === "" || !Number.isFinite(typed)) return;
    range.value = at(typed);
    change(typed);
  });
  const box = field(words, range, number);
  box.set = (typed) => { number.value = typed; range.value = at(typed); };
  return box;
}

export function choices(words, names, chosen, change) {
  const box = make("div", { className: "choices", role: "group", ariaLabel: words });
  const set = (name) => { for (const button of box.children) button.setAttribute("aria-pressed", String(button.dataset.name === name)); };
  box.append(...names.map((name) => {
    const [key, text] = Array.isArray(name) ? name : [name, name];
    const button = make("button", { type: "button", textContent: text, on: { click() { set(key); change(key); } } });
    button.dataset.name = key;
    return button;
  }));
  set(chosen);
  box.set = set;
  return box;
}

// A bar of this share, and a mark at another one.
export function gauge(share, at = null) {
  const bar = make("span"), mark = make("i");
  bar.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  if (at !== null) mark.style.left = `${100 * Math.min(1, at)}%`;
  return make("td", { className: "gauge" }, make("div", { className: "track" }, bar, at === null ? null : mark));
}

export const table = (caption, heads, rows) => make("table", { className: "plain" },
  make("caption", { textContent: caption }),
  make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", textContent: text })))),
  make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell, i) =>
    (cell instanceof Node && (cell.tagName === "TD" || cell.tagName === "TH") ? cell : make(i ? "td" : "th", { ...(i ? {} : { scope: "row" }) }, cell ?? "")))))));

// ---------------------------------------------------------------------- numbers

export const count = (n) => Math.round(n).toLocaleString("en");
const scaled = (n, step, units) => {
  let i = 0;
  for (; Math.abs(n) >= step && i < units.length - 1; i++) n /= step;
  return `${Number(n.toPrecision(3))} ${units[i]}`.trim();
};
export const large = (n) => scaled(n, 1000, ["", "k", "M", "G", "T", "P", "E"]);
export const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
export const seconds = (s) => (s < 1e-3 ? `${(s * 1e6).toPrecision(3)} µs` : s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);

// ---------------------------------------------------------------------- pictures

// A picture of cells, 0 … 255 each, as SVG: rows are run-length coded, so that large ones stay small.
export function cells(values, title, side = 320) {
  const rows = values.length, columns = values[0]?.length ?? 0, size = side / Math.max(rows, columns, 1);
  const svg = draw("svg", { class: "cells", viewBox: `0 0 ${columns * size} ${rows * size}`, role: "img", "shape-rendering": "crispEdges" });
  svg.append(draw("title", {}, title), draw("rect", { class: "paper", width: columns * size, height: rows * size }));
  values.forEach((row, i) => {
    for (let j = 0; j < columns;) {
      let k = j;
      while (k < columns && row[k] === row[j]) k++;
      if (row[j]) svg.append(draw("rect", { class: "ink", x: j * size, y: i * size, width: (k - j) * size, height: size, "fill-opacity": (row[j] / 255).toFixed(3) }));
      j = k;
    }
  });
  return svg;
}

const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "opacity", "dominant-baseline"];

// An SVG as a file of its own: what the style sheet says is written into it.
function standing(svg) {
  const copy = svg.cloneNode(true), { width, height } = svg.getBoundingClientRect();
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((one, i) => {
    const style = getComputedStyle(one);
    for (const name of KEPT) if (style.getPropertyValue(name)) to[i].setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--card");
  copy.prepend(draw("rect", { width: "100%", height: "100%", fill: paper.trim() }));
  return new XMLSerializer().serializeToString(copy);
}

export function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function png(picture) {
  if (picture instanceof HTMLCanvasElement) return new Promise((take) => picture.toBlob(take));
  const image = new Image(), { width, height } = picture.getBoundingClientRect();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standing(picture))}`;
  await image.decode();
  const canvas = make("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  return new Promise((take) => canvas.toBlob(take));
}

function svgText(picture) {
  if (!(picture instanceof HTMLCanvasElement)) return standing(picture);
  const { width, height } = picture.getBoundingClientRect();
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><image width="${width}" height="${height}" href="${picture.toDataURL()}"/></svg>`;
}

// Buttons that save a picture (an SVG or a canvas, or a function that finds it) under a name.
export function saving(name, picture) {
  const find = () => (typeof picture === "function" ? picture() : picture);
  const button = (kind, act) => make("button", { type: "button", textContent: kind, title: `Save as ${kind}`, ariaLabel: `Save ${name} as ${kind}`, on: { async click() {
    const found = find();
    if (found) download(`${name}.${kind.toLowerCase()}`, await act(found));
  } } });
  return make("span", { className: "saving" }, button("SVG", async (found) => new Blob([svgText(found)], { type: "image/svg+xml" })), button("PNG", png));
}
