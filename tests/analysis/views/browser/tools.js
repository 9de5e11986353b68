// What the clicking scripts use. `found` is what a script finds; `wrong` is filled by errors of the page.
const found = {};
const find = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => find(selector).textContent;
const button = (words, within = "") => all(`${within} button`).find((one) => one.textContent === words);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function until(test) {
  for (let i = 0; i < 200 && !test(); i++) await pause(20);
  if (!test()) throw new Error(`waited for ${test}`);
}

const ready = (what) => until(() => document.documentElement.dataset.ready === what);
const row = (i) => until(() => find("#detail .place").textContent.startsWith(`${i + 1} of `));
const key = (name, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));

// The table of what the chosen token looks at: keys and weights.
const looks = () => [...all("#detail table")[0].querySelectorAll("tr")].map((line) =>
  [line.querySelector(".key").textContent, line.querySelector(".number").textContent]);
const pressed = () => all(".thumb").filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.at);

// How many colors a canvas has: 1 where nothing was drawn.
function ink(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}

async function report(script) {
  try {
    await script();
  } catch (error) {
    wrong.push(error.stack);
  }
  Object.assign(found, { wrong, fetched: performance.getEntriesByType("resource").length });
  const result = Object.assign(document.createElement("pre"), { id: "found" });
  result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.append(result);
}
