// Masks: an expression with completion and errors at their column; drawing, count, plan, predicted cost, catalogue.
import { Latest, ask, cells, count, field, make, pane, progress, readState, ready, saveButtons, slider, status, table } from "./tools.js";

// e: the expression; n: the number of tokens.
const DEFAULTS = { e: "causal() & (window(64, 0) | every(128))", n: 1024 };
const LENGTHS = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072];

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial), latest = new Latest(signal), listing = new Latest(signal);
  const input = make("input", { type: "text", value: state.e, spellcheck: false, autocomplete: "off", className: "code wide", role: "combobox", ariaAutoComplete: "list" });
  input.setAttribute("aria-controls", "completions");
  input.setAttribute("aria-expanded", "false");
  const list = make("ul", { id: "completions", role: "listbox", hidden: true, className: "completions" });
  const errorBox = make("pre", { className: "caret", role: "alert" }), out = make("div", { className: "answer" });
  const length = slider("Tokens", LENGTHS, state.n, (n) => go({ n }), { min: 1, max: 1 << 17, integer: true });
  const catalogue = pane("patterns"), axes = () => make("p", { className: "axes", textContent: "query ↓ key →" });
  const complete = completing(input, list, () => go({ e: input.value }));
  box.append(
    make("h1", { textContent: "Masks" }),
    make("p", { className: "lead", textContent: "Which keys each query may attend to, as an expression. Rows are queries, columns are keys; colored pairs may attend. Combine masks with & | ~ and .T" }),
    make("div", { className: "form" }, make("div", { className: "field grow" }, field("Expression", input), list, errorBox), length),
    out, make("h2", { textContent: "Catalogue" }), make("p", { className: "note", textContent: "Well-known masks of 2,048 tokens. Select one to see its drawing, its plan and its cost." }), catalogue);
  input.addEventListener("input", () => go({ e: input.value }));

  function go(changes, wait = 0) {
    Object.assign(state, changes);
    if (input.value !== state.e) input.value = state.e;
    remember(state, DEFAULTS);
    latest.run((stop) => ask("mask", { expression: state.e, queries: state.n }, { signal: stop }), show, fail, wait);
  }

  function fail(error) {
    if (error.field === "queries") { ready("error"); return length.problem(error.message); }
    input.setAttribute("aria-invalid", "true");
    out.classList.add("old");
    errorBox.textContent = `${error.column ? `${state.e}\n${" ".repeat(error.column - 1)}^\n` : ""}${error.message.replace(/^column \d+: /, "")}`;
    ready("error");
  }

  function show(result) {
    input.removeAttribute("aria-invalid");
    out.classList.remove("old");
    errorBox.textContent = "";
    const { plan, predicted_cost: predicted } = result, ratio = predicted.sparse_ms / predicted.dense_ms;
    const drawing = cells(result.cells, `${result.expression}: ${result.caption}`), planDrawing = cells(plan.cells, `Blocks computed for ${result.expression}`);
    const patch = result.patch && cells(result.patch.cells, `${result.expression}: ${result.patch.caption}`);
    out.replaceChildren(
      ...(patch ? [make("figure", {}, patch, make("figcaption", {}, `One patch: ${result.patch.caption} `, saveButtons("patch", patch)))] : []),
      make("figure", {}, axes(), drawing, make("figcaption", {}, `Allowed pairs: ${result.caption} `, saveButtons("mask", drawing))),
      make("figure", {}, axes(), planDrawing, make("figcaption", {}, plan.density >= 1 ? "Pairs that a GPU computes: all of them " : "Pairs that a GPU computes, in blocks ", saveButtons("plan", planDrawing))),
      make("div", { className: "facts" },
        table("Count", ["", ""], [
          ["Pairs allowed", `${count(result.allowed)} of ${count(result.queries * result.keys)}`],
          ["Density", result.density.toPrecision(4)],
          ["Sparsity", `${(100 * (1 - result.density)).toFixed(1)} %`],
          ["Empty rows", result.may_have_empty_rows ? "possible; their output is zero" : "none"],
        ]),
        table(`Predicted cost on ${predicted.device}, ${predicted.n_heads} heads of dimension ${predicted.head_dim}`, ["", ""], [
          ["Sparse", `${predicted.sparse_ms.toPrecision(3)} ms`],
          ["Dense", `${predicted.dense_ms.toPrecision(3)} ms`],
          ["Ratio", `${ratio.toPrecision(3)}${ratio >= 1 ? " (dense is faster at this length)" : ""}`],
        ]),
        make("h3", { textContent: "How the kernel computes it" }), make("dl", { className: "plan-text" }, ...plan.explanation.map((line) => line.trim()).filter(Boolean).flatMap((line) => { const [name, text = ""] = line.split(/\s{2,}(.*)/); return [make("dt", { textContent: name }), make("dd", { textContent: text })]; }))));
    ready(`mask ${result.expression} ${result.queries}`);
  }

  go({});
  catalogue.loading("Drawing the catalogue …");
  listing.run((stop) => ask("mask_catalogue", {}, { signal: stop, onProgress: progress }), ({ patterns, functions }) => {
    status("");
    complete(functions);
    catalogue.show(make("div", { className: "catalogue" }, ...patterns.map((pattern) => make("button", { type: "button", className: "card", title: pattern.expression, on: { click() {
      length.set(pattern.queries);
      go({ e: pattern.expression, n: pattern.queries });
      scrollTo({ top: 0, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    } } }, cells(pattern.cells, pattern.expression, 96), make("span", { textContent: pattern.name })))));
  }, (error) => { status(""); catalogue.fail(error.message); });
}

// Completion of function names: arrow keys select, Enter or Tab accepts, Escape closes. Returns a setter of the functions.
function completing(input, list, onChange) {
  let functions = [], selected = -1, matches = [];
  const prefix = () => /[a-z]+$/.exec(input.value.slice(0, input.selectionStart))?.[0] ?? "";
  const close = () => { list.hidden = true; selected = -1; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  function show() {
    const start = prefix();
    matches = start && !/^\w/.test(input.value.slice(input.selectionStart)) ? functions.filter(({ name }) => name.startsWith(start) && name !== start) : [];
    if (!matches.length) return close();
    selected = Math.max(-1, Math.min(selected, matches.length - 1));
    list.replaceChildren(...matches.map(({ usage, description }, i) => {
      const option = make("li", { role: "option", id: `completion-${i}`, on: { pointerdown(event) { event.preventDefault(); accept(i); } } },
        make("b", { textContent: usage }), ` ${description}`);
      option.setAttribute("aria-selected", String(i === selected));
      return option;
    }));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    if (selected >= 0) input.setAttribute("aria-activedescendant", `completion-${selected}`);
  }
  function accept(i) {
    const start = input.selectionStart - prefix().length, { name, usage } = matches[i], isNullary = usage.endsWith("()");
    input.setRangeText(isNullary ? `${name}()` : `${name}(`, start, input.selectionStart, "end");
    close();
    onChange();
  }
  input.addEventListener("input", show);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      selected = (selected + (event.key === "ArrowDown" ? 1 : -1) + matches.length) % matches.length;
      show();
    } else if ((event.key === "Enter" || event.key === "Tab") && (selected >= 0 || event.key === "Tab")) accept(Math.max(0, selected));
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
  });
  return (newFunctions) => { functions = newFunctions; };
}
