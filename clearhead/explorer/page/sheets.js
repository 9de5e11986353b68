// Sheets: a problem with boxes for its answers, marked cell by cell; another seed gives other numbers.
import { Latest, ask, field, make, ready, slider, status } from "./tools.js";

const DEFAULTS = { name: "sort-dedup", seed: 0, solution: "" };
const SAYS = { right: "right", wrong: "not right", blank: "" };

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given, seed: Number(given.seed) || 0 }, latest = new Latest(signal), other = new Latest(signal);
  const pick = make("select", { on: { change() { go({ name: pick.value, solution: "" }); } } }), out = make("div", { className: "worksheet" });
  const seed = slider("Seed: 0 is as printed, others have new numbers", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (value) => go({ seed: Math.max(0, Math.round(value)) }));
  const total = make("span", { className: "note", role: "status" });
  const act = (text, run, main = "") => make("button", { type: "button", className: `act ${main}`, textContent: text, on: { click: run } });
  box.append(make("h1", { textContent: "Sheets" }),
    make("p", { className: "lead", textContent: "Every step of a small example. Answers may be 3, 1/3, 0.3333 or e^3/(2*e^3 + 4); what is exact is marked exactly, decimals to the places you write." }),
    make("div", { className: "form" }, field("Problem", pick), seed), out,
    make("div", { className: "form top-gap" }, act("Mark my answers", mark, "main"), act("Show the solution", () => go({ solution: state.solution ? "" : "yes" })), act("Print", () => print()), total));
  let sheet = null, inputs = [];

  function go(changes) {
    const again = !sheet || ["name", "seed"].some((key) => key in changes);
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!again) return show();
    latest.run((stop) => ask("sheet", { name: state.name, seed: state.seed }, { signal: stop }), (found) => { sheet = found; show(); }, fail);
  }

  const fail = (error) => { out.replaceChildren(make("p", { className: "caret", role: "alert", textContent: error.message })); ready("refused"); };

  function show() {
    inputs = [];
    total.textContent = "";
    out.replaceChildren(make("h2", { textContent: sheet.title }), make("p", { className: "lead", textContent: sheet.question }), ...sheet.steps.map(step),
      ...(state.solution ? sheet.closing.map(([heading, sentences]) => make("section", {}, make("h3", { textContent: heading }), make("ul", {}, ...sentences.map((text) => make("li", { textContent: text }))))) : []));
    ready(`sheet ${sheet.name} ${state.seed} ${state.solution}`);
  }

  function step(one, number) {
    const isOpen = one.given || state.solution, solved = one.given ? one.cells : one.exact;
    const body = one.cells.map((line, i) => make("tr", {}, one.single ? null : make("th", { scope: "row", textContent: one.rows[i] }), ...line.map((words, j) => {
      if (isOpen) return make("td", {}, solved[i][j], one.decimals && !one.given && one.decimals[i][j] !== solved[i][j] ? make("span", { className: "near", textContent: ` ≈ ${one.decimals[i][j]}` }) : "");
      const place = [one.title, one.rows[i], one.columns[j]].filter(Boolean).join(", ");
      const input = make("input", { type: "text", className: "code cell", ariaLabel: place, autocomplete: "off" });
      inputs.push({ key: one.key, i, j, input });
      return make("td", {}, input);
    })));
    const head = one.single ? [] : [make("thead", {}, make("tr", {}, make("td"), ...one.columns.map((text) => make("th", { scope: "col", textContent: text }))))];
    return make("section", { className: one.given ? "given" : "" }, make("h3", {}, `${number + 1}. ${one.title}`, one.symbol && one.single ? ` ${one.symbol}` : ""),
      one.formula ? make("p", { className: "note code", textContent: one.formula }) : null,
      make("div", { className: "scroll" }, make("table", { className: "exacts" }, ...head, make("tbody", {}, ...body))),
      isOpen && one.legend.length && !one.given ? make("ul", { className: "note" }, ...one.legend.map(([letter, text]) => make("li", { textContent: `${letter} = ${text}` }))) : null,
      isOpen && one.note && !one.given ? make("p", { className: "note", textContent: one.note }) : null);
  }

  function mark() {
    const answers = {};
    for (const { key, i, j, input } of inputs) ((answers[key] ??= [])[i] ??= [])[j] = input.value.trim();
    for (const [key, rows] of Object.entries(answers)) if (rows.flat().every((text) => !text)) delete answers[key];
    if (!Object.keys(answers).length) { total.textContent = "There is nothing to mark yet: write into the boxes."; return; }
    latest.run((stop) => ask("marks", { name: state.name, seed: state.seed, answers }, { signal: stop }), (found) => {
      let right = 0, cells = 0;
      for (const step of found.steps) { right += step.right; cells += step.cells; }
      for (const { key, i, j, input } of inputs) {
        const told = found.steps.find((step) => step.key === key)?.marks[i]?.[j] ?? "blank";
        input.dataset.mark = told;
        input.setAttribute("aria-invalid", String(told === "wrong"));
        input.title = SAYS[told];
      }
      total.textContent = `${right} of ${cells} cells right${found.unanswered.length ? `; not answered: ${found.unanswered.join(", ")}` : ""}`;
      ready(`marked ${right}/${cells}`);
    }, (error) => { total.textContent = error.message; ready("refused"); });
  }

  other.run((stop) => ask("sheets", {}, { signal: stop }), ({ sheets }) => {
    pick.append(...sheets.map(({ name, title }) => make("option", { value: name, textContent: title, selected: name === state.name })));
    go({});
  }, (error) => status(error.message));
}
