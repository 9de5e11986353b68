// Attribution of an image: the probabilities of every image model, and maps that explain their predictions.
import { architectureName, cells, gauge, make, saveButtons } from "./tools.js";

export function digitView({ models }, pad) {
  return make("div", { className: "predictions" }, ...models.map((model) => result(model, pad.bytes())));
}

function result({ name, architecture, probabilities, pixel_attribution: attribution, attention }, pixels) {
  const best = probabilities.indexOf(Math.max(...probabilities));
  const bars = make("table", { className: "plain probabilities" }, make("caption", { textContent: "Probabilities" }), make("tbody", {}, ...probabilities.map((p, i) =>
    make("tr", { className: i === best ? "selected" : "" }, make("th", { scope: "row", textContent: i }), gauge(p), make("td", { textContent: p >= 0.001 ? p.toFixed(3) : "<0.001" })))));
  const map = (values, title, file) => { const svg = overlay(values, pixels, title); return make("figure", {}, svg, make("figcaption", {}, `${title} `, saveButtons(`${name}-${file}`, svg))); };
  return make("article", {}, make("h2", {}, `${name}: `, make("b", { className: "answer-digit", textContent: best })), make("p", { className: "note", textContent: architectureName(architecture) }), bars,
    make("div", { className: "maps" }, map(attribution, "Pixel attribution", "pixels"), attention ? map(attention, "Attention rollout", "attention") : null));
}

// Draw a map over the drawing.
function overlay(values, pixels, title) {
  const svg = cells(values, title, 160), size = svg.viewBox.baseVal, bytes = atob(pixels), side = Math.sqrt(bytes.length), step = size.width / side;
  const background = svg.querySelector(".paper");
  for (let i = 0; i < bytes.length; i++) {
    const light = bytes.charCodeAt(i);
    if (light < 80) continue;
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ class: "ghost", x: (i % side) * step, y: Math.floor(i / side) * step, width: step, height: step, "fill-opacity": (light / 600).toFixed(3) })) dot.setAttribute(key, value);
    background.after(dot);
  }
  return svg;
}
