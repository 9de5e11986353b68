// Masks: an expression, with completion and errors at their column; drawing, count, plan, price, and a gallery.
import { Latest, ask, cells, count, field, make, progress, ready, saving, slider, status, table } from "./tools.js";

const DEFAULTS = { e: "causal() & (window(8, 0) | every(16))", n: 64 };
const LENGTHS = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072];

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given, n: Number(given.n) || DEFAULTS.n }, latest = new Latest(signal), other = new Latest(signal);
  const input = make("input", { type: "text", value: state.e, spellcheck: false, autocomplete: "off", className: "code wide", role: "combobox", ariaAutoComplete: "list" });
  input.setAttribute("aria-controls", "completions");
  input.setAttribute("aria-expanded", "false");
  const list = make("ul", { id: "completions", role: "listbox", hidden: true, className: "completions" });
  const where = make("pre", { className: "caret", role: "alert" }), out = make("div", { className: "answer" });
  const length = slider("Tokens", LENGTHS, state.n, (n) => go({ n: Math.max(1, Math.round(n)) }));
  const shelf = make("div", { className: "gallery" });
  const complete = completing(input, list, () => go({ e: input.value }));
  box.append(
    make("h1", { textContent: "Masks" }),
    make("p", { className: "lead", textContent: "Who may attend to whom, as an expression. Rows are queries, columns are keys; dark may attend. Join masks by & | ~ and .T" }),
    make("div", { className: "form" }, make("div", { className: "field grow" }, field("Expression", input), list, where), length),
    out, make("h2", { textContent: "Gallery" }), shelf);
  input.addEventListener("input", () => go({ e: input.value }));

  function go(changes, wait = 0) {
    Object.assign(state, changes);
    if (input.value !== state.e) input.value = state.e;
    remember(state, DEFAULTS);
    latest.run((stop) => ask("mask", { expression: state.e, n: state.n }, { signal: stop }), show, fail, wait);
  }

  function fail(error) {
    input.setAttribute("aria-invalid", "true");
    out.classList.add("old");
    where.textContent = `${error.column ? `${state.e}\n${" ".repeat(error.column - 1)}^\n` : ""}${error.message.replace(/^column \d+: /, "")}`;
    ready("refused");
  }

  function show(found) {
    input.removeAttribute("aria-invalid");
    out.classList.remove("old");
    where.textContent = "";
    const { plan, price } = found, share = price.planned / price.every_pair;
    const drawn = cells(found.cells, `${found.expression}: ${found.caption}`), planned = cells(plan.cells, `What is computed for ${found.expression}`);
    out.replaceChildren(
      make("figure", {}, drawn, make("figcaption", {}, `What may attend: ${found.caption} `, saving("mask", drawn))),
      make("figure", {}, planned, make("figcaption", {}, "What a GPU computes for it, in blocks ", saving("plan", planned))),
      make("div", { className: "facts" },
        table("Count", ["", ""], [
          ["Pairs allowed", `${count(found.allowed)} of ${count(found.queries * found.keys)}`],
          ["Density", found.density.toPrecision(4)],
          ["Saving", `${(100 * (1 - found.density)).toFixed(1)} %`],
          ["Empty rows", found.empty ? "possible: they give zeros" : "none"],
        ]),
        table(`Price, predicted for ${price.on}, ${price.heads} heads of width 64`, ["", ""], [
          ["With this plan", `${price.planned.toPrecision(3)} ms`],
          ["Every pair", `${price.every_pair.toPrecision(3)} ms`],
          ["Share", `${share.toPrecision(3)}${share >= 1 ? ": not worth a plan at this length" : ""}`],
        ]),
        make("pre", { className: "words", textContent: plan.words.map((line) => line.trim()).join("\n") })));
    ready(`mask ${found.expression} ${found.queries}`);
  }

  go({});
  other.run((stop) => ask("gallery", {}, { signal: stop, onProgress: progress }), ({ gallery, words }) => {
    status("");
    complete(words);
    shelf.replaceChildren(...gallery.map((one) => make("button", { type: "button", className: "card", title: one.expression, on: { click() {
      length.set(one.n);
      go({ e: one.expression, n: one.n });
      scrollTo({ top: 0, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    } } }, cells(one.cells, one.expression, 96), make("span", { textContent: one.name }))));
  }, (error) => status(error.message));
}

// Words of the notation that go on from what is typed: arrows choose, Enter or Tab takes, Escape closes.
function completing(input, list, changed) {
  let words = [], at = -1, found = [];
  const begun = () => /[a-z]+$/.exec(input.value.slice(0, input.selectionStart))?.[0] ?? "";
  const close = () => { list.hidden = true; at = -1; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  function show() {
    const part = begun();
    found = part && !/^\w/.test(input.value.slice(input.selectionStart)) ? words.filter(({ name }) => name.startsWith(part) && name !== part) : [];
    if (!found.length) return close();
    at = Math.max(-1, Math.min(at, found.length - 1));
    list.replaceChildren(...found.map(({ usage, says }, i) => {
      const one = make("li", { role: "option", id: `completion-${i}`, on: { pointerdown(event) { event.preventDefault(); take(i); } } },
        make("b", { textContent: usage }), ` ${says}`);
      one.setAttribute("aria-selected", String(i === at));
      return one;
    }));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    if (at >= 0) input.setAttribute("aria-activedescendant", `completion-${at}`);
  }
  function take(i) {
    const start = input.selectionStart - begun().length, { name, usage } = found[i], bare = usage.endsWith("()");
    input.setRangeText(bare ? `${name}()` : `${name}(`, start, input.selectionStart, "end");
    close();
    changed();
  }
  input.addEventListener("input", show);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      at = (at + (event.key === "ArrowDown" ? 1 : -1) + found.length) % found.length;
      show();
    } else if ((event.key === "Enter" || event.key === "Tab") && (at >= 0 || event.key === "Tab")) take(Math.max(0, at));
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
  });
  return (known) => { words = known; };
}
