// Mounts the scripts of `clearhead inspect --html` and `clearhead walk --html` in the stage, with the elements that they expect.
import { highlight, onHighlight } from "./hover.js";
import { show as showReport } from "./report.js";
import { field, make, saveButtons } from "./tools.js";
import { show as showWalkthrough } from "./walkthrough.js";

const part = (tag, id, className = "") => make(tag, { id, className });
const helpDialog = () => make("dialog", { id: "help" }, make("h2", { textContent: "Keyboard" }), make("p", { textContent: "Arrow keys move between heads and layers, or steps and blocks; [ and ] between tokens or heads; 1 2 3 change the view; in a matrix + − 0 zoom." }),
  make("form", { method: "dialog" }, make("button", { textContent: "Close" })));
const helpButton = () => make("button", { id: "help-open", type: "button", title: "Keyboard (?)", ariaLabel: "Keyboard help", textContent: "?" });

// The name of the token that row or column i of a map stands for. A row of cross-attention is the token that it predicts.
const tokenOf = (map, axis, i) => {
  if (map.stack.includes("encoder") || (map.kind === "cross" && axis === "column")) return `s${i}`;
  return `t${map.kind === "cross" ? i + 1 : i}`;
};

// Show an attention report. `place` stores the selection in the address; `layerChoice` is shown above a long text.
export function attentionView(pane, result, place, signal, layerChoice = null) {
  const save = saveButtons("attention", () => document.querySelector("#view canvas, #view svg"));
  result.footer = result.footer.replace(/ This page is self-contained.*/, "");
  pane.show(layerChoice, make("div", { className: "look-main" }, make("nav", { id: "heads", ariaLabel: "Layers and heads" }),
    make("section", { id: "stage" }, make("div", { className: "bar" }, make("h2", { id: "where", ariaLive: "polite" }), make("div", { className: "form tight" }, make("div", { className: "choices", id: "views", role: "group", ariaLabel: "View" }), save, helpButton())),
      part("p", "what"), make("div", { id: "view", tabIndex: -1 }), part("p", "legend")),
    make("aside", { id: "detail", ariaLabel: "Details of the selected token" })),
  part("section", "more"), make("div", { className: "unseen" }, part("p", "title"), part("dl", "facts")), part("footer", "foot"), helpDialog());
  const view = showReport(result, signal, ...place);
  document.addEventListener("reportpreview", ({ detail: { map, row, column } }) => highlight(column !== null ? tokenOf(map, "column", column) : row === null ? null : tokenOf(map, "row", row)), { signal });
  onHighlight((token) => view.mark((map, axis, i) => token !== null && tokenOf(map, axis, i) === token), signal);
  return view;
}

export function stepsView(pane, result, place, signal) {
  const save = saveButtons("architecture", () => document.querySelector("#drawing svg"));
  pane.show(make("div", { className: "walk" }, make("header", { className: "inner" }, make("div", {}, part("p", "title", "unseen"), part("dl", "facts", "unseen"), part("dl", "sizes")), make("div", { className: "form tight" }, save, helpButton())),
    make("div", { className: "walk-main" }, make("nav", { id: "drawing", ariaLabel: "Architecture" }), make("section", { id: "step", tabIndex: -1, ariaLive: "polite" })), part("div", "paper")), helpDialog());
  return showWalkthrough(result, signal, ...place);
}

// A select of layers, for a text whose layers are shown one at a time.
export const layerSelect = (layers, selected, onChange) => field("Layer (a long text shows one at a time)", make("select", { on: { change(event) { onChange(event.target.value); } } },
  ...layers.map(({ path }) => make("option", { value: path, textContent: path, selected: path === selected }))));
