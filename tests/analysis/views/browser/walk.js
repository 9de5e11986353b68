// Walks through the page of "Hello world": by the drawing, by the strip, by keys, and on paper.
report(async () => {
  const heading = () => text("#step h2");
  const cells = () => all("#step .grid tbody tr").map((line) => [...line.querySelectorAll("td")].map((cell) => cell.textContent));
  results.opened = [heading(), text("#step .place")];
  results.flow = all("#step .flow .part b").map((name) => name.textContent);
  key("Home");
  await ready("0/0");
  results.title = text("#title");
  results.start = heading();
  results.nodes = all("#drawing .node").map((node) => node.getAttribute("aria-label"));
  results.skips = all("#drawing path.skip").length;
  results.memory = all("#drawing path.memory").length;
  results.loop = all("#drawing path.loop").length;

  key("ArrowRight");
  results.next = heading();
  all("#drawing .node").find((node) => node.getAttribute("aria-label") === "Decoder block 0: Cross-attention")
    .dispatchEvent(new MouseEvent("click", { bubbles: true }));
  results.clicked = [heading(), text("#step .place")];
  button("softmax", "#step .strip [aria-current=true] ~").click();
  all("#step .heads button")[3].click();
  results.softmax = [heading(), text("#step h3"), cells()];
  key("ArrowDown");
  results.below = [heading(), text("#step .place"), document.documentElement.dataset.ready];
  results.folded = all("#drawing .node.folded").map((node) => node.textContent);
  key("]");
  results.head = text("#step h3");
  all("#drawing .node")[0].dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
  results.entered = heading();
  key("End");
  results.end = heading();
  results.written = all("#step .chips span").map((chip) => chip.firstChild.textContent);
  key("ArrowLeft");
  results.likeliest = all("#step .bars table").map((table) => [...table.querySelectorAll("tr")].map((line) =>
    [line.cells[0].textContent, line.cells[2].textContent, line.className]));
  key("Home");
  key("ArrowRight");
  key("ArrowRight");
  const vector = () => find("#step .vector-open");
  results.vector = [vector().getAttribute("aria-expanded") === "true"];
  vector().click();
  results.vector.push(vector().getAttribute("aria-expanded") === "true", all("#step .whole-vector span").length);
  vector().click();
  results.vector.push(find("#step .whole-vector") !== null);
  let saved = null;
  URL.createObjectURL = (blob) => { saved = blob; return "#"; };
  find("#save-svg").click();
  results.svg = await saved.text();
  print = () => { results.printed = document.documentElement.classList.contains("drawing-only"); dispatchEvent(new Event("afterprint")); };
  find("#save-pdf").click();
  key("?");
  results.help = find("#help").open;
  find("#help").close();
  dispatchEvent(new Event("beforeprint"));
  results.paper = all("#paper article").length;
  dispatchEvent(new Event("afterprint"));
  results.wide = document.documentElement.scrollWidth <= innerWidth;
});
