// The tabs, in groups. The state of a panel is part of the address, as in #mask?e=causal()&n=64.
import "./hover.js";
import { sharedState } from "./subject.js";
import { make, toggle } from "./tools.js";

const GROUPS = [
  ["Model", [["model", "Run"], ["tour", "Tour"], ["intervention", "Interventions"], ["interpret", "Interpret"], ["comparison", "Compare"], ["training", "Training"]]],
  ["Learn", [["by_hand", "By hand"], ["mask", "Masks"], ["claims", "Claims"], ["exercises", "Exercises"]]],
  ["Plan", [["cost", "Cost"]]],
];
const PANELS = GROUPS.flatMap(([, panels]) => panels), MODEL_PANELS = GROUPS[0][1].map(([name]) => name);
const panel = document.getElementById("panel"), tabs = document.getElementById("tabs");
let current = null, closing = new AbortController(), lastHash = null;

function read() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [PANELS.some(([id]) => id === name) ? name : "model", Object.fromEntries(new URLSearchParams(query))];
}

const hashOf = (name, state) => {
  const query = new URLSearchParams(Object.entries(state).map(([key, value]) => [key, String(value)])).toString();
  return `#${name}${query ? `?${query}` : ""}`;
};

// Write the state of a panel to the address. Defaults are left out, so that addresses stay short.
function remember(name, state, defaults) {
  if (name !== current) return;
  const changed = Object.fromEntries(Object.entries(state).filter(([key, value]) => key in defaults && value !== null && value !== undefined && String(value) !== String(defaults[key] ?? "")));
  lastHash = hashOf(name, changed);
  if (location.hash !== lastHash) history.replaceState(null, "", lastHash);
  if (MODEL_PANELS.includes(name)) linkModelPanels(changed);
}

// Let the links of the group Model keep the model, the input and the generated tokens.
function linkModelPanels(state) {
  for (const link of tabs.querySelectorAll("a")) if (MODEL_PANELS.includes(link.dataset.name)) link.href = hashOf(link.dataset.name, sharedState(state));
}

async function open() {
  const [name, initial] = read();
  if (location.hash === lastHash && name === current) return;
  lastHash = location.hash;
  current = name;
  closing.abort();
  closing = new AbortController();
  const { signal } = closing;
  for (const link of tabs.querySelectorAll("a")) toggle(link, "aria-current", link.dataset.name === name ? "page" : null);
  tabs.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${PANELS.find(([id]) => id === name)[1]} · clearhead`;
  document.documentElement.dataset.panel = name;
  delete document.documentElement.dataset.ready;
  delete document.documentElement.dataset.shown;
  document.getElementById("status").textContent = "";
  const { open: openPanel } = await import(`./${name}.js`);
  if (signal.aborted) return;
  const box = make("section", { className: `panel ${name}` });
  panel.replaceChildren(box);
  openPanel(box, initial, { signal, remember: (state, defaults = {}) => remember(name, state, defaults) });
}

const linkOf = ([name, title]) => {
  const link = make("a", { href: `#${name}`, textContent: title });
  link.dataset.name = name;
  return link;
};
tabs.append(...GROUPS.map(([title, panels]) => {
  const group = make("div", { className: "tab-group", role: "group", ariaLabel: title }, make("span", { className: "tab-title", textContent: title }), make("div", {}, ...panels.map(linkOf)));
  return group;
}));
// Open the panel again, from the state in the address.
const reopen = () => { lastHash = null; open(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", reopen); // colors that scripts computed are those of the previous theme
addEventListener("retry", reopen);
addEventListener("hashchange", open);
open();
