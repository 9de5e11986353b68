// The tabs. The state of a panel is part of the address, as in #mask?e=causal()&n=64.
import { make, toggle } from "./tools.js";

const PANELS = [
  ["model", "Model"], ["intervention", "Interventions"], ["by_hand", "Attention by hand"], ["mask", "Masks"],
  ["digit", "Draw a digit"], ["cost", "Cost"], ["claims", "Claims"], ["exercises", "Exercises"],
];
const panel = document.getElementById("panel"), tabs = document.getElementById("tabs");
let current = null, closing = new AbortController(), lastHash = null;

function read() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [PANELS.some(([id]) => id === name) ? name : "model", Object.fromEntries(new URLSearchParams(query))];
}

// Write the state of a panel to the address. Defaults are left out, so that addresses stay short.
function remember(name, state, defaults) {
  if (name !== current) return;
  const changed = Object.entries(state).filter(([key, value]) => value !== null && value !== undefined && String(value) !== String(defaults[key] ?? ""));
  const query = new URLSearchParams(changed.map(([key, value]) => [key, String(value)])).toString();
  lastHash = `#${name}${query ? `?${query}` : ""}`;
  if (location.hash !== lastHash) history.replaceState(null, "", lastHash);
}

async function open() {
  const [name, initial] = read();
  if (location.hash === lastHash && name === current) return;
  lastHash = location.hash;
  current = name;
  closing.abort();
  closing = new AbortController();
  const { signal } = closing;
  for (const link of tabs.children) toggle(link, "aria-current", link.dataset.name === name ? "page" : null);
  tabs.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${PANELS.find(([id]) => id === name)[1]} · clearhead`;
  document.documentElement.dataset.panel = name;
  delete document.documentElement.dataset.ready;
  document.getElementById("status").textContent = "";
  const { open: openPanel } = await import(`./${name}.js`);
  if (signal.aborted) return;
  const box = make("section", { className: `panel ${name}` });
  panel.replaceChildren(box);
  openPanel(box, initial, { signal, remember: (state, defaults = {}) => remember(name, state, defaults) });
}

tabs.append(...PANELS.map(([name, title]) => {
  const link = make("a", { href: `#${name}`, textContent: title });
  link.dataset.name = name;
  return link;
}));
addEventListener("hashchange", open);
open();
