// Helpers of the scripts. `results` is returned to the test; `wrong` contains errors of the page.
const results = {};
const find = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => find(selector).textContent;
const button = (label, within = "") => all(`${within} button`).find((element) => element.textContent === label);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function until(test) {
  for (let i = 0; i < 200 && !test(); i++) await pause(20);
  if (!test()) throw new Error(`waited for ${test}`);
}

const ready = (state) => until(() => document.documentElement.dataset.ready === state);
const row = (i) => until(() => find("#detail .place").textContent.startsWith(`${i + 1} of `));
const key = (name, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));

// Return the table of the selected query: keys and weights.
const weightTable = () => [...all("#detail table")[0].querySelectorAll("tr")].map((line) =>
  [line.querySelector(".key").textContent, line.querySelector(".number").textContent]);
const pressed = () => all(".thumb").filter((element) => element.getAttribute("aria-pressed") === "true").map((element) => element.dataset.at);

// Return the number of colors of a canvas: 1 if it is empty.
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
  Object.assign(results, { wrong, fetched: performance.getEntriesByType("resource").length });
  const result = Object.assign(document.createElement("pre"), { id: "results" });
  result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(results))));
  document.body.append(result);
}
