// The shell: which panel is shown. What is chosen in it stands in the address: #masks?e=causal()&n=64.
import { make, toggle } from "./tools.js";

const PANELS = [
  ["run", "Run"], ["change", "Change it"], ["hand", "Attention by hand"], ["masks", "Masks"],
  ["digit", "Draw a digit"], ["cost", "Cost"], ["claims", "Claims"], ["sheets", "Sheets"],
];
const panel = document.getElementById("panel"), tabs = document.getElementById("tabs");
let here = null, ended = new AbortController(), written = null;

function read() {
  const [name, words = ""] = location.hash.slice(1).split("?");
  return [PANELS.some(([known]) => known === name) ? name : "run", Object.fromEntries(new URLSearchParams(words))];
}

// A panel writes its state here; only what differs from its defaults is kept, so that addresses stay short.
function remember(name, state, defaults) {
  if (name !== here) return;
  const kept = Object.entries(state).filter(([key, value]) => value !== null && value !== undefined && String(value) !== String(defaults[key] ?? ""));
  const words = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  written = `#${name}${words ? `?${words}` : ""}`;
  if (location.hash !== written) history.replaceState(null, "", written);
}

async function open() {
  const [name, given] = read();
  if (location.hash === written && name === here) return;
  written = location.hash;
  here = name;
  ended.abort();
  ended = new AbortController();
  const { signal } = ended;
  for (const link of tabs.children) toggle(link, "aria-current", link.dataset.name === name ? "page" : null);
  tabs.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${PANELS.find(([known]) => known === name)[1]} · clearhead`;
  document.documentElement.dataset.panel = name;
  delete document.documentElement.dataset.ready;
  document.getElementById("status").textContent = "";
  const { open: begin } = await import(`./${name}.js`);
  if (signal.aborted) return;
  const box = make("section", { className: `panel ${name}` });
  panel.replaceChildren(box);
  begin(box, given, { signal, remember: (state, defaults = {}) => remember(name, state, defaults) });
}

tabs.append(...PANELS.map(([name, words]) => {
  const link = make("a", { href: `#${name}`, textContent: words });
  link.dataset.name = name;
  return link;
}));
addEventListener("hashchange", open);
open();
