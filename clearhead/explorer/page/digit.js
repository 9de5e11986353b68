// Draw a digit: the image models classify it after every stroke; maps explain their predictions.
import { Latest, ask, cells, gauge, make, ready, saveButtons } from "./tools.js";
import { drawingPad } from "./drawing.js";

const DEFAULTS = { ink: "" };

export function open(box, initial, { signal, remember }) {
  const latest = new Latest(signal), out = make("div", { className: "predictions" }), errorBox = make("p", { className: "caret", role: "alert" });
  const board = drawingPad(() => go(true), initial.ink ?? "");
  box.append(make("h1", { textContent: "Draw a digit" }),
    make("p", { className: "lead", textContent: "A vision Transformer and a convolutional network, trained on house numbers, classify your drawing after every stroke. The maps show which pixels the prediction depends on, and where the Transformer attends." }),
    errorBox, make("div", { className: "two digits" }, make("figure", {}, board.box, make("figcaption", {}, saveButtons("digit", board.canvas))), out));

  function go(hasChanged) {
    if (hasChanged) remember({ ink: board.strokes() }, DEFAULTS);
    const pixels = board.bytes();
    latest.run((stop) => ask("classify_digit", { pixels }, { signal: stop }), ({ models }) => {
      errorBox.textContent = "";
      out.replaceChildren(...models.map((model) => prediction(model, pixels)));
      ready(`digit ${models.map(({ probabilities }) => probabilities.indexOf(Math.max(...probabilities))).join(" ")}`);
    }, (error) => { errorBox.textContent = error.message; ready("error"); });
  }
  go(false);
}

function prediction({ name, architecture, probabilities, pixel_attribution: attribution, attention }, pixels) {
  const best = probabilities.indexOf(Math.max(...probabilities));
  const bars = make("table", { className: "plain probabilities" }, make("caption", { textContent: "Probabilities" }), make("tbody", {}, ...probabilities.map((p, i) =>
    make("tr", { className: i === best ? "selected" : "" }, make("th", { scope: "row", textContent: i }), gauge(p), make("td", { textContent: p.toFixed(3) })))));
  const map = (values, title, file) => { const svg = overlay(values, pixels, title); return make("figure", {}, svg, make("figcaption", {}, `${title} `, saveButtons(`${name}-${file}`, svg))); };
  return make("article", {}, make("h2", {}, `${name}: `, make("b", { className: "answer-digit", textContent: best })), make("p", { className: "note", textContent: architecture }), bars,
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
