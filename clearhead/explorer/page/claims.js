// Claims: browse the statements, try one again, or guess its verdict first.
import { Latest, ask, choices, field, make, progress, ready, saving, slider, status } from "./tools.js";

const DEFAULTS = { id: "", theme: "", words: "", seed: 0, quiz: "" };
const said = (verdict) => verdict[0].toUpperCase() + verdict.slice(1);

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given, seed: Number(given.seed) || 0 }, latest = new Latest(signal), other = new Latest(signal);
  const list = make("ul", { className: "entries" }), one = make("article", { className: "entry" }), score = { right: 0, of: 0 };
  const themes = make("select", { on: { change() { fill({ theme: themes.value }); } } });
  const words = make("input", { type: "search", value: state.words, on: { input() { fill({ words: words.value }); } } });
  const mode = choices("How", [["", "Browse"], ["yes", "Quiz"]], state.quiz, (quiz) => { go({ quiz }); });
  box.append(make("h1", { textContent: "Claims" }),
    make("p", { className: "lead", textContent: "Statements about attention and its neighbours from courses and exams, each tried by a program: now, on this machine, with the seed that you choose." }),
    make("div", { className: "form" }, mode, field("Theme", themes), field("Words", words)),
    make("div", { className: "two" }, make("div", { className: "list" }, list), one));
  let claims = [], verdicts = [];

  function fill(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    const asked = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = claims.filter((claim) => (!state.theme || claim.theme === state.theme) && asked.every((word) => `${claim.statement} ${claim.id}`.toLowerCase().includes(word)));
    list.replaceChildren(...found.map((claim) => {
      const button = make("button", { type: "button", on: { click() { go({ id: claim.id }); } } }, make("span", { className: "note", textContent: claim.theme }), claim.statement);
      button.setAttribute("aria-current", String(claim.id === state.id));
      return make("li", {}, button);
    }), ...(found.length ? [] : [make("li", { className: "note", textContent: "no statement has these words" })]));
    return found;
  }

  function go(changes) {
    latest.stop();
    const found = fill(changes);
    const claim = claims.find(({ id }) => id === state.id) ?? found[0];
    if (!claim) return one.replaceChildren();
    if (claim.id !== state.id) return go({ id: claim.id });
    const out = make("div");
    const seed = slider("Seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], state.seed, (value) => { state.seed = Math.max(0, Math.round(value)); remember(state, DEFAULTS); });
    one.replaceChildren(make("h2", { textContent: claim.statement }), make("p", { className: "note", textContent: `${claim.source}, ${claim.location}` }),
      state.quiz ? quiz(claim, out) : make("div", { className: "form" }, seed, make("button", { type: "button", className: "act main", textContent: "Try it now", on: { click() { run(claim, out); } } })), out);
    ready(`claim ${claim.id}`);
  }

  function quiz(claim, out) {
    const answers = verdicts.map((verdict) => make("button", { type: "button", className: "act", textContent: said(verdict), on: { click() {
      for (const button of answers) button.disabled = true;
      run(claim, out, verdict);
    } } }));
    const next = make("button", { type: "button", className: "act", textContent: "Next", on: { click() {
      const found = fill({}), others = found.filter(({ id }) => id !== claim.id);
      go({ id: (others[Math.floor(Math.random() * others.length)] ?? claim).id });
    } } });
    return make("div", { className: "form" }, ...answers, next, make("span", { className: "note", id: "score", textContent: score.of ? `${score.right} of ${score.of} right` : "What do you think?" }));
  }

  function run(claim, out, guess = null) {
    out.textContent = "Trying it …";
    latest.run((stop) => ask("claim", { name: claim.id, seed: state.seed }, { signal: stop, onProgress: progress }), (found) => {
      status("");
      if (guess) {
        score.of++;
        score.right += guess === found.verdict;
        document.getElementById("score").textContent = `${guess === found.verdict ? "Right." : "Not so."} ${score.right} of ${score.of} right`;
      }
      out.replaceChildren(...told(found));
      ready(`verdict ${found.id} ${found.verdict}`);
    }, (error) => { out.textContent = error.message; status(""); });
  }

  function told(found) {
    const parts = [make("p", { className: `verdict ${found.verdict.replaceAll(" ", "-")}`, textContent: said(found.verdict) + (found.condition ? `: ${found.condition}` : "") })];
    if (found.counter_example) parts.push(make("p", {}, make("b", { textContent: "Counter-example: " }), found.counter_example));
    if (found.correction) parts.push(make("p", {}, make("b", { textContent: "Instead: " }), found.correction));
    parts.push(make("p", { className: "note", textContent: `${found.method} · seed ${found.seed} · ${found.seconds} s` }),
      make("ul", { className: "evidence" }, ...found.evidence.map((line) => make("li", { textContent: line }))));
    if (found.figure) {
      const svg = document.importNode(new DOMParser().parseFromString(found.figure, "image/svg+xml").documentElement, true);
      parts.push(make("figure", { className: "sheet-figure" }, svg, make("figcaption", {}, saving(found.id, svg))));
    }
    return parts;
  }

  other.run((stop) => ask("claims", {}, { signal: stop }), (found) => {
    ({ claims, verdicts } = found);
    themes.append(make("option", { value: "", textContent: `all ${claims.length}` }), ...[...new Set(claims.map(({ theme }) => theme))].map((theme) => make("option", { value: theme, textContent: theme, selected: theme === state.theme })));
    go({});
  }, (error) => status(error.message));
}
