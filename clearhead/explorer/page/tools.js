// Helpers of all panels: elements, requests, fields, number formats and saved images.

// Create an element with properties and children: make("td", { className: "number" }, "0.5").
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
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

export class RequestError extends Error {
  constructor(event, status) { super(event.error); Object.assign(this, event, { status }); }
}

// `fetch` and its streams raise TypeError if the connection fails.
const NO_RESPONSE = { error: "the server does not respond; check that it is running" };
const connected = (promise) => promise.catch((error) => { throw error instanceof TypeError ? new RequestError(NO_RESPONSE) : error; });

// Send a request and return its result. Aborting the signal also cancels the request on the server.
export async function ask(action, body, { signal, onPart, onProgress } = {}) {
  const response = await connected(fetch(`api/${action}`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  }));
  if (!response.ok) throw new RequestError(await connected(response.json()), response.status);
  let last = null;
  const onLine = (line) => {
    const event = JSON.parse(line);
    if ("done" in event || "error" in event) last = event;
    if ("part" in event) onPart?.(event.part);
    if ("progress" in event) onProgress?.(event.progress);
  };
  if (onPart || onProgress) await readLines(response.body.getReader(), onLine);
  else (await connected(response.text())).trimEnd().split("\n").forEach(onLine);
  if (!last) throw new RequestError({ error: "the connection closed before the result arrived; check that the server is running" });
  if (last.error) throw new RequestError(last.error);
  return last.done;
}

async function readLines(reader, onLine) {
  const decoder = new TextDecoder();
  let parts = [];
  for (;;) {
    const { done, value } = await connected(reader.read());
    if (done) return;
    const lines = decoder.decode(value, { stream: true }).split("\n");
    lines.forEach((line, i) => {
      parts.push(line);
      if (i === lines.length - 1) return;
      onLine(parts.join(""));
      parts = [];
    });
  }
}

// Runs requests one at a time: a new request cancels the previous one. `wait` milliseconds debounce quick changes.
export class Latest {
  constructor(signal) {
    this.closing = signal;
    signal.addEventListener("abort", () => this.stop());
  }

  stop() {
    clearTimeout(this.timer);
    this.controller?.abort();
  }

  // Call `send(signal)`, and then `show` with its result or `fail` with its error, unless a newer request has started.
  run(send, show, fail, wait = 0) {
    this.stop();
    if (this.closing.aborted) return;
    const controller = (this.controller = new AbortController());
    this.timer = setTimeout(async () => {
      let result;
      try {
        result = await send(controller.signal);
      } catch (error) {
        if (controller.signal.aborted) return;
        if (!(error instanceof RequestError)) throw error;
        return fail(error);
      }
      if (!controller.signal.aborted) show(result); // an error in here is one of the page, not of the server
    }, wait);
  }
}

export const button = (label, onClick, properties = {}) => make("button", { type: "button", className: "act", textContent: label, ...properties, on: { click: onClick } });

export const status = (text) => { document.getElementById("status").textContent = text; };
export const progress = ({ completed, total, label }) => status(`${label} (${Math.round((100 * completed) / total)} %)`);
// Mark the panel as drawn; tests and benchmarks wait for this attribute.
export const ready = (state) => { document.documentElement.dataset.ready = state; };

// Return the state of a panel: its defaults, and the values of the address. Unknown names are dropped; so are values that
// are not numbers where the default is one or the name is among `numbers`, and views that are not among `views`.
export function readState(defaults, initial, { numbers = [], views = null } = {}) {
  const isNumeric = (name) => typeof defaults[name] === "number" || numbers.includes(name);
  const isValid = ([name, value]) => Object.hasOwn(defaults, name) && (value === "" || !isNumeric(name) || Number.isFinite(Number(value))) && (name !== "view" || !views || views.some(([view]) => view === value));
  const state = { ...defaults, ...Object.fromEntries(Object.entries(initial).filter(isValid)) };
  for (const [name, value] of Object.entries(defaults)) if (typeof value === "number") state[name] = state[name] === "" ? value : Number(state[name]);
  return state;
}

// ---------------------------------------------------------------------- fields

let nFields = 0;

// Create a field with a label: field("Tokens", make("input", …)). `problem(text)` shows a message below the input.
export function field(label, input, ...more) {
  input.id ||= `field-${++nFields}`;
  const problem = make("p", { className: "problem", role: "alert", id: `${input.id}-problem` });
  const box = make("div", { className: "field" }, make("label", { htmlFor: input.id, textContent: label }), input, ...more, problem);
  box.problem = (text) => {
    problem.textContent = text;
    toggle(input, "aria-invalid", text ? "true" : null);
    toggle(input, "aria-describedby", text ? problem.id : null);
  };
  return box;
}

// Create a slider over the values `steps`, with a number field that accepts other values too. A value out of range is
// not used; the field says so and names the value that is used instead.
export function slider(label, steps, value, onChange, { min = steps[0], max = Infinity, integer = false } = {}) {
  const nearest = (number) => steps.reduce((best, step, i) => (Math.abs(step - number) < Math.abs(steps[best] - number) ? i : best), 0);
  const number = make("input", { type: "number", value, min, step: integer ? 1 : "any", ariaLabel: label, className: "typed" });
  const plain = (n) => n.toLocaleString("en", { maximumFractionDigits: 6 });
  const expected = `expected a ${integer ? "whole " : ""}number ${max === Infinity ? `of at least ${plain(min)}` : `from ${plain(min)} to ${plain(max)}`}`;
  let used = Number(value);
  const use = (typed) => { used = typed; box.problem(""); onChange(typed); };
  const range = make("input", { type: "range", min: 0, max: steps.length - 1, value: nearest(value), on: { input() {
    number.value = steps[range.value];
    use(steps[range.value]);
  } } });
  number.addEventListener("input", () => {
    const typed = Number(number.value);
    const isValid = number.value !== "" && Number.isFinite(typed) && typed >= min && typed <= max && (!integer || Number.isInteger(typed));
    if (!isValid) return box.problem(`${expected}; ${plain(used)} is used`);
    range.value = nearest(typed);
    use(typed);
  });
  const box = field(label, number, range);
  range.ariaLabel = `${label}, slider`;
  box.set = (typed) => { used = typed; number.value = typed; range.value = nearest(typed); box.problem(""); };
  return box;
}

// Show an error next to the field that it names, or in `fallback(message)`. `fields` maps names of the request to fields.
export function routeError(error, fields, fallback) {
  const box = fields[error.field];
  if (box) {
    box.problem(error.message);
    const closed = box.closest("details:not([open])");
    if (closed) closed.open = true;
  }
  fallback(box ? "" : error.message);
}

// Create an area for results with the states loading, empty, error and shown. Older results stay, dimmed, until the new ones arrive.
export function pane(className = "") {
  const note = make("p", { className: "pane-note", role: "status" }), content = make("div", { className: "pane-content" });
  const box = make("div", { className: `pane ${className}` }, note, content);
  const set = (state, text = "") => { box.dataset.state = state; note.textContent = text; toggle(note, "role", state === "error" ? "alert" : "status"); };
  let timer = 0;
  Object.assign(box, {
    content,
    loading(text = "Loading …") { clearTimeout(timer); timer = setTimeout(() => set("loading", text), content.childElementCount ? 200 : 0); },
    show(...children) { clearTimeout(timer); set("shown"); content.replaceChildren(...children.filter((child) => child !== null && child !== undefined)); },
    fail(text) { clearTimeout(timer); set("error", text); },
    empty(text) { clearTimeout(timer); content.replaceChildren(); set("empty", text); },
    note(text) { note.textContent = text; },
  });
  return box;
}

// Create a row of buttons of which one is pressed. An option is a name, or a pair of a name and its label.
export function choices(label, options, selected, onChange) {
  const box = make("div", { className: "choices", role: "group", ariaLabel: label });
  const set = (name) => { for (const button of box.children) button.setAttribute("aria-pressed", String(button.dataset.name === name)); };
  box.append(...options.map((option) => {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    const button = make("button", { type: "button", textContent: text, on: { click() { set(key); onChange(key); } } });
    button.dataset.name = key;
    return button;
  }));
  set(selected);
  box.set = set;
  return box;
}

// Create a table cell with a bar from 0 to `share`, and a tick at `tick`.
export function gauge(share, tick = null) {
  const bar = make("span"), mark = make("i");
  bar.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  if (tick !== null) mark.style.left = `${100 * Math.min(1, tick)}%`;
  return make("td", { className: "gauge" }, make("div", { className: "track" }, bar, tick === null ? null : mark));
}

export const table = (caption, headings, rows) => make("table", { className: "plain" },
  make("caption", { textContent: caption }),
  make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col", textContent: text })))),
  make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell, i) =>
    (cell instanceof Node && (cell.tagName === "TD" || cell.tagName === "TH") ? cell : make(i ? "td" : "th", { ...(i ? {} : { scope: "row" }) }, cell ?? "")))))));

// Return the name of a module for people: "decoder block 2, cross-attention".
export const architectureName = (name) => ({ EncoderDecoder: "Encoder-decoder", VisionTransformer: "Vision Transformer", CTCEncoder: "CTC encoder" })[name] ?? name;
export const layerName = (path) => path.replace(/(^|\.)blocks\.(\d+)/, (_, dot, n) => `${dot ? " " : ""}block ${n}`).replace(".cross_attention", ", cross-attention").replace(".attention", ", self-attention").replace(/\.feed_forward(\.\w+)?$/, ", feed-forward");

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

// ---------------------------------------------------------------------- images

// Draw a matrix of values 0 … 255 as SVG. Equal neighbors in a row share one rectangle.
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

const SVG_STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "opacity", "dominant-baseline"];

// Return an SVG as text that needs no style sheet: computed styles become attributes.
function standaloneSvg(svg) {
  const copy = svg.cloneNode(true), { width, height } = svg.getBoundingClientRect();
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const name of SVG_STYLES) if (style.getPropertyValue(name)) to[i].setAttribute(name, style.getPropertyValue(name));
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
  if (picture instanceof HTMLCanvasElement) return new Promise((resolve) => picture.toBlob(resolve));
  const image = new Image(), { width, height } = picture.getBoundingClientRect();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standaloneSvg(picture))}`;
  await image.decode();
  const canvas = make("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  return new Promise((resolve) => canvas.toBlob(resolve));
}

function svgText(picture) {
  if (!(picture instanceof HTMLCanvasElement)) return standaloneSvg(picture);
  const { width, height } = picture.getBoundingClientRect();
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><image width="${width}" height="${height}" href="${picture.toDataURL()}"/></svg>`;
}

// Create buttons that save an SVG or a canvas, or the one that a function returns, as a file.
export function saveButtons(name, picture) {
  const current = () => (typeof picture === "function" ? picture() : picture);
  const button = (kind, convert) => make("button", { type: "button", textContent: kind, title: `Save as ${kind}`, ariaLabel: `Save ${name} as ${kind}`, on: { async click() {
    const image = current();
    if (image) download(`${name}.${kind.toLowerCase()}`, await convert(image));
  } } });
  return make("span", { className: "saving" }, button("SVG", async (image) => new Blob([svgText(image)], { type: "image/svg+xml" })), button("PNG", png));
}
