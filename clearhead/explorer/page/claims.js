// Claims: browse the statements, run one, or guess its verdict first.
import { Latest, ask, choices, field, make, progress, readState, ready, saveButtons, slider, status } from "./tools.js";

const DEFAULTS = { id: "", theme: "", search: "", seed: 0, quiz: "" };
const SUBSCRIPT = /([\p{L}])_(\{[^}]+\}|[\p{L}\d]{1,2}(?![\p{L}\d_])|(?:model|max|min)(?![\p{L}\d_]))/gu;

// Return a statement with its indices as subscripts: "d_k" and "Σ_{i<j}", but not the words of a name such as "num_heads".
function typeset(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(SUBSCRIPT)) {
    if (/[\p{L}\d_]/u.test(text[match.index - 1] ?? " ")) continue;
    parts.push(text.slice(end, match.index + match[1].length), make("sub", { textContent: match[2].replace(/[{}]/g, "") }));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}
const capitalize = (verdict) => verdict[0].toUpperCase() + verdict.slice(1);

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial), latest = new Latest(signal), listing = new Latest(signal);
  const list = make("ul", { className: "entries" }), entry = make("article", { className: "entry" }), score = { right: 0, of: 0 };
  const themes = make("select", { on: { change() { fill({ theme: themes.value }); } } });
  const search = make("input", { type: "search", value: state.search, on: { input() { fill({ search: search.value }); } } });
  const mode = choices("Mode", [["", "Browse"], ["yes", "Quiz"]], state.quiz, (quiz) => { go({ quiz }); });
  box.append(make("h1", { textContent: "Claims" }),
    make("p", { className: "lead", textContent: "Statements about attention from courses and exams. Is each true? A program tests it now, on this machine, with the seed that you choose." }),
    make("div", { className: "form" }, mode, field("Theme", themes), field("Search", search)),
    make("div", { className: "two" }, make("div", { className: "list" }, list), entry));
  let claims = [], verdicts = [];

  function fill(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    const terms = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = claims.filter((claim) => (!state.theme || claim.theme === state.theme) && terms.every((term) => `${claim.statement} ${claim.id}`.toLowerCase().includes(term)));
    list.replaceChildren(...matches.flatMap((claim, i) => {
      const button = make("button", { type: "button", on: { click() { go({ id: claim.id }); } } }, ...typeset(claim.statement));
      button.setAttribute("aria-current", String(claim.id === state.id));
      return [...(claim.theme === matches[i - 1]?.theme ? [] : [make("li", { className: "theme", textContent: claim.theme })]), make("li", {}, button)];
    }), ...(matches.length ? [] : [make("li", { className: "note", textContent: "no statement contains these words" })]));
    return matches;
  }

  function go(changes) {
    latest.stop();
    const matches = fill(changes);
    const claim = claims.find(({ id }) => id === state.id) ?? matches[0];
    if (!claim) { entry.replaceChildren(); return ready("no claim"); }
    if (claim.id !== state.id) return go({ id: claim.id });
    const out = make("div");
    const seed = slider("Seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (value) => { state.seed = value; remember(state, DEFAULTS); run(claim, out, null, 150); }, { min: 0, max: Number.MAX_SAFE_INTEGER, integer: true });
    entry.replaceChildren(make("h2", {}, ...typeset(claim.statement)), make("p", { className: "note", textContent: `${claim.source}, ${claim.location}` }),
      state.quiz ? quiz(claim, out) : make("div", { className: "form" }, seed, make("button", { type: "button", className: "act main", textContent: "Run again", on: { click() { run(claim, out); } } })), out);
    ready(`claim ${claim.id}`);
    if (!state.quiz) run(claim, out, null, 150); // the answer first; a claim that is only passed by is not run
  }

  function quiz(claim, out) {
    const answers = verdicts.map((verdict) => make("button", { type: "button", className: "act", textContent: capitalize(verdict), on: { click() {
      for (const button of answers) button.disabled = true;
      run(claim, out, verdict);
    } } }));
    const next = make("button", { type: "button", className: "act", textContent: "Next", on: { click() {
      const candidates = fill({}).filter(({ id }) => id !== claim.id);
      go({ id: (candidates[Math.floor(Math.random() * candidates.length)] ?? claim).id });
    } } });
    return make("div", { className: "form" }, ...answers, next, make("span", { className: "note", id: "score", textContent: score.of ? `${score.right} of ${score.of} right` : "Choose a verdict" }));
  }

  function run(claim, out, guess = null, wait = 0) {
    if (out.childElementCount) out.classList.add("old");
    else out.replaceChildren(make("p", { className: "note", textContent: "Testing the claim …" }));
    latest.run((stop) => ask("run_claim", { name: claim.id, seed: state.seed }, { signal: stop, onProgress: progress }), (result) => {
      status("");
      if (guess) {
        score.of++;
        score.right += guess === result.verdict;
        document.getElementById("score").textContent = `${guess === result.verdict ? "Right." : "Wrong."} ${score.right} of ${score.of} right`;
      }
      out.classList.remove("old");
      out.replaceChildren(...outcome(result));
      ready(`verdict ${result.id} ${result.verdict}`);
    }, (error) => { out.classList.remove("old"); out.replaceChildren(make("p", { className: "caret", role: "alert", textContent: error.message })); status(""); ready("error"); }, wait);
  }

  function outcome(result) {
    const parts = [make("p", { className: `verdict ${result.verdict.replaceAll(" ", "-")}`, textContent: capitalize(result.verdict) + (result.condition ? `: ${result.condition}` : "") })];
    if (result.counter_example) parts.push(make("p", {}, make("b", { textContent: "Counter-example: " }), ...typeset(result.counter_example)));
    if (result.correction) parts.push(make("p", {}, make("b", { textContent: "Correction: " }), ...typeset(result.correction)));
    parts.push(make("h3", { textContent: "Evidence" }), make("p", { className: "note" }, ...typeset(`${result.method} · seed ${result.seed} · ${result.seconds} s`)),
      make("ul", { className: "evidence" }, ...result.evidence.map((line) => make("li", {}, ...typeset(line)))));
    if (result.figure) {
      const svg = document.importNode(new DOMParser().parseFromString(result.figure, "image/svg+xml").documentElement, true);
      parts.push(make("figure", { className: "sheet-figure" }, svg, make("figcaption", {}, saveButtons(result.id, svg))));
    }
    return parts;
  }

  listing.run((stop) => ask("claims", {}, { signal: stop }), (result) => {
    ({ claims, verdicts } = result);
    if (!claims.some(({ theme }) => theme === state.theme)) state.theme = "";
    themes.append(make("option", { value: "", textContent: `all ${claims.length}` }), ...[...new Set(claims.map(({ theme }) => theme))].map((theme) => make("option", { value: theme, textContent: theme, selected: theme === state.theme })));
    go({});
  }, (error) => status(error.message));
}
