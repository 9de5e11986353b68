// Exercises: a worksheet with fields for the answers, graded cell by cell; another seed gives new numbers.
import { Latest, ask, field, make, readState, ready, slider, status } from "./tools.js";

const KEYS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], Enter: [1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }; // moves between cells

const DEFAULTS = { name: "sort-dedup", seed: 0, solution: "" };
const MARKS = { right: "right", wrong: "not right", blank: "" };

// Return numbers as text: "1 to 3, 7".
const ranges = (numbers) => numbers.reduce((runs, n) => { if (runs.at(-1)?.[1] === n - 1) runs.at(-1)[1] = n; else runs.push([n, n]); return runs; }, []).map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ");

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial), latest = new Latest(signal), listing = new Latest(signal);
  const pick = make("select", { on: { change() { go({ name: pick.value, solution: "" }); } } }), out = make("div", { className: "worksheet" });
  const seed = slider("Seed (0: original numbers)", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (seed) => go({ seed }), { min: 0, max: Number.MAX_SAFE_INTEGER, integer: true });
  const total = make("span", { className: "note", role: "status" });
  const act = (text, run, main = "") => make("button", { type: "button", className: `act ${main}`, textContent: text, on: { click: run } });
  box.append(make("h1", { textContent: "Exercises" }),
    make("p", { className: "lead", textContent: "Compute every step of a small example, and have each cell graded. Answers may be 3, 1/3, 0.3333 or e^3/(2*e^3 + 4): exact answers are graded exactly, decimals to the places that you write. Enter and the arrow keys move between cells." }),
    make("div", { className: "form" }, field("Exercise", pick), seed), out,
    make("div", { className: "form actions" }, act("Grade my answers", grade, "main"), act("Show the solution", () => go({ solution: state.solution ? "" : "yes" })), act("Print", () => print()), total));
  let worksheet = null, inputs = [];

  function go(changes) {
    const isNew = !worksheet || ["name", "seed"].some((key) => key in changes);
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    if (!isNew) return show();
    latest.run((stop) => ask("worksheet", { name: state.name, seed: state.seed }, { signal: stop }), (result) => { worksheet = result; show(); }, fail);
  }

  const fail = (error) => { out.replaceChildren(make("p", { className: "caret", role: "alert", textContent: error.message })); ready("error"); };

  function show() {
    inputs = [];
    total.textContent = "";
    const steps = worksheet.steps.map(showStep), nGiven = worksheet.steps.findIndex((step) => !step.is_given), given = make("div", { className: "givens" }, ...steps.slice(0, nGiven));
    out.replaceChildren(make("h2", { textContent: worksheet.title }), make("p", { className: "lead", textContent: worksheet.question }), given, ...steps.slice(nGiven),
      ...(state.solution ? worksheet.closing.map(([heading, sentences]) => make("section", {}, make("h3", { textContent: heading }), make("ul", {}, ...sentences.map((text) => make("li", { textContent: text }))))) : []));
    ready(`worksheet ${worksheet.name} ${state.seed} ${state.solution}`);
  }

  function showStep(step, number) {
    const isVisible = step.is_given || state.solution, solved = step.is_given ? step.cells : step.exact;
    const body = step.cells.map((line, i) => make("tr", {}, step.is_scalar ? null : make("th", { scope: "row", textContent: step.rows[i] }), ...line.map((_, j) => {
      if (isVisible) return make("td", {}, solved[i][j], step.decimals && !step.is_given && step.decimals[i][j] !== solved[i][j] ? make("span", { className: "near", textContent: ` ≈ ${step.decimals[i][j]}` }) : "");
      const label = [step.title, step.rows[i], step.columns[j]].filter(Boolean).join(", ");
      const input = make("input", { type: "text", className: "code cell", ariaLabel: label, autocomplete: "off", on: { keydown: (event) => move(event, step.key, i, j), input: () => { delete input.dataset.mark; input.removeAttribute("aria-invalid"); } } });
      inputs.push({ key: step.key, i, j, input });
      return make("td", {}, input);
    })));
    const heading = step.is_scalar ? [] : [make("thead", {}, make("tr", {}, make("td"), ...step.columns.map((text) => make("th", { scope: "col", textContent: text }))))];
    const score = make("small", { className: "step-score" });
    score.dataset.step = step.key;
    return make("section", { className: step.is_given ? "given" : "" }, make("h3", {}, `${number + 1}. ${step.title}`, step.symbol && step.is_scalar ? ` ${step.symbol}` : "", score),
      step.formula ? make("p", { className: "note code", textContent: step.formula }) : null,
      make("div", { className: "scroll" }, make("table", { className: "exacts" }, ...heading, make("tbody", {}, ...body))),
      isVisible && step.legend.length && !step.is_given ? make("ul", { className: "note" }, ...step.legend.map(([letter, text]) => make("li", { textContent: `${letter} = ${text}` }))) : null,
      isVisible && step.note && !step.is_given ? make("p", { className: "note", textContent: step.note }) : null);
  }

  // Move the focus to a neighboring cell of the same step; left and right only from the end of the text, or if all of it is selected.
  function move(event, key, i, j) {
    const by = KEYS[event.key], { selectionStart, selectionEnd, value } = event.target;
    if (!by || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const isAllSelected = selectionStart === 0 && selectionEnd === value.length;
    if (by[1] && !isAllSelected && (selectionStart !== selectionEnd || selectionStart !== (by[1] > 0 ? value.length : 0))) return;
    const next = inputs.find((cell) => cell.key === key && cell.i === i + by[0] && cell.j === j + by[1]) ?? (event.key === "Enter" ? inputs.find((cell) => cell.key === key && cell.i === 0 && cell.j === j + 1) : null);
    if (!next) return;
    event.preventDefault();
    next.input.focus();
    next.input.select();
  }

  function grade() {
    const answers = {};
    for (const { key, i, j, input } of inputs) ((answers[key] ??= [])[i] ??= [])[j] = input.value.trim();
    for (const [key, rows] of Object.entries(answers)) if (rows.flat().every((text) => !text)) delete answers[key];
    if (!Object.keys(answers).length) { total.textContent = "Enter an answer first."; return; }
    latest.run((stop) => ask("grade", { name: state.name, seed: state.seed, answers }, { signal: stop }), (result) => {
      let right = 0, cells = 0;
      for (const step of result.steps) { right += step.right; cells += step.cells; }
      for (const { key, i, j, input } of inputs) {
        const bad = result.unreadable.find((cell) => cell.key === key && cell.row === i && cell.column === j);
        const mark = bad ? "unreadable" : result.steps.find((step) => step.key === key)?.marks[i]?.[j] ?? "blank";
        input.dataset.mark = mark;
        input.setAttribute("aria-invalid", String(mark === "wrong" || mark === "unreadable"));
        input.title = bad ? bad.message : MARKS[mark];
      }
      for (const score of out.querySelectorAll(".step-score")) {
        const step = result.steps.find(({ key }) => key === score.dataset.step);
        score.textContent = step ? ` ${step.right} of ${step.cells} right` : "";
        score.dataset.full = String(Boolean(step) && step.right === step.cells);
      }
      const first = result.unreadable[0];
      total.textContent = `${right} of ${cells} cells right${first ? `; ${result.unreadable.length === 1 ? "one cell is not a number" : `${result.unreadable.length} cells are not numbers`} (${first.message})` : ""}${result.unanswered.length ? `; not answered: ${result.unanswered.length === 1 ? "step" : "steps"} ${ranges(worksheet.steps.flatMap((step, k) => (result.unanswered.includes(step.key) ? [k + 1] : [])))}` : ""}`;
      ready(`graded ${right}/${cells}`);
    }, (error) => { total.textContent = error.message; ready("error"); });
  }

  listing.run((stop) => ask("problems", {}, { signal: stop }), ({ problems }) => {
    pick.append(...problems.map(({ name, title }) => make("option", { value: name, textContent: title, selected: name === state.name })));
    go({});
  }, (error) => status(error.message));
}
