// Draw a digit: the models of pictures read it stroke by stroke, and show what they looked at.
import { Latest, ask, cells, gauge, make, ready, saving } from "./tools.js";
import { pad } from "./pad.js";

const DEFAULTS = { ink: "" };

export function open(box, given, { signal, remember }) {
  const latest = new Latest(signal), out = make("div", { className: "readers" }), wrong = make("p", { className: "caret", role: "alert" });
  const board = pad(() => go(true), given.ink ?? "");
  box.append(make("h1", { textContent: "Draw a digit" }),
    make("p", { className: "lead", textContent: "A vision Transformer and a convolutional network, trained on house numbers, read what you draw after every stroke. Shaded over it: the pixels that could still change the answer, and where attention went." }),
    wrong, make("div", { className: "two digits" }, make("figure", {}, board.box, make("figcaption", {}, saving("digit", board.canvas))), out));

  function go(keep) {
    if (keep) remember({ ink: board.strokes() }, DEFAULTS);
    const pixels = board.bytes();
    latest.run((stop) => ask("digit", { pixels }, { signal: stop }), ({ models }) => {
      wrong.textContent = "";
      out.replaceChildren(...models.map((model) => reader(model, pixels)));
      ready(`digit ${models.map(({ chances }) => chances.indexOf(Math.max(...chances))).join(" ")}`);
    }, (error) => { wrong.textContent = error.message; ready("refused"); });
  }
  go(false);
}

function reader({ name, kind, chances, counts, attended }, pixels) {
  const best = chances.indexOf(Math.max(...chances));
  const bars = make("table", { className: "plain chances" }, make("caption", { textContent: "Chances" }), make("tbody", {}, ...chances.map((p, i) =>
    make("tr", { className: i === best ? "taken" : "" }, make("th", { scope: "row", textContent: i }), gauge(p), make("td", { textContent: p.toFixed(3) })))));
  const map = (values, words, file) => { const svg = over(values, pixels, words); return make("figure", {}, svg, make("figcaption", {}, `${words} `, saving(`${name}-${file}`, svg))); };
  return make("article", {}, make("h2", {}, `${name}: `, make("b", { className: "answer-digit", textContent: best })), make("p", { className: "note", textContent: kind }), bars,
    make("div", { className: "maps" }, map(counts, "Pixels that count", "pixels"), attended ? map(attended, "Where attention went", "attention") : null));
}

// Shares over the drawing itself.
function over(values, pixels, words) {
  const svg = cells(values, words, 160), size = svg.viewBox.baseVal, bytes = atob(pixels), side = Math.sqrt(bytes.length), step = size.width / side;
  const paper = svg.querySelector(".paper");
  for (let i = 0; i < bytes.length; i++) {
    const light = bytes.charCodeAt(i);
    if (light < 80) continue;
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ class: "ghost", x: (i % side) * step, y: Math.floor(i / side) * step, width: step, height: step, "fill-opacity": (light / 600).toFixed(3) })) dot.setAttribute(key, value);
    paper.after(dot);
  }
  return svg;
}
