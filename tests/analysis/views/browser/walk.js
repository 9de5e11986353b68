// Walks through the page of "Hello world": by the drawing, by the strip, by keys, and on paper.
report(async () => {
  const heading = () => text("#step h2");
  const cells = () => all("#step .grid tbody tr").map((line) => [...line.querySelectorAll("td")].map((cell) => cell.textContent));
  await ready("0/0");
  found.title = text("#title");
  found.start = heading();
  found.nodes = all("#drawing .node").map((node) => node.getAttribute("aria-label"));
  found.skips = all("#drawing path.skip").length;
  found.memory = all("#drawing path.memory").length;
  found.loop = all("#drawing path.loop").length;

  key("ArrowRight");
  found.next = heading();
  all("#drawing .node").find((node) => node.getAttribute("aria-label") === "Decoder block 0: Cross-attention")
    .dispatchEvent(new MouseEvent("click", { bubbles: true }));
  found.clicked = [heading(), text("#step .place")];
  button("softmax", "#step .strip [aria-current=true] ~").click();
  all("#step .heads button")[3].click();
  found.softmax = [heading(), text("#step h3"), cells()];
  key("ArrowDown");
  found.below = [heading(), text("#step .place"), document.documentElement.dataset.ready];
  found.folded = all("#drawing .node.folded").map((node) => node.textContent);
  key("]");
  found.head = text("#step h3");
  all("#drawing .node")[0].dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
  found.entered = heading();
  key("End");
  found.end = heading();
  found.written = all("#step .chips span").map((chip) => chip.firstChild.textContent);
  key("ArrowLeft");
  found.likeliest = all("#step .bars table").map((table) => [...table.querySelectorAll("tr")].map((line) =>
    [line.cells[0].textContent, line.cells[2].textContent, line.className]));
  key("?");
  found.help = find("#help").open;
  find("#help").close();
  dispatchEvent(new Event("beforeprint"));
  found.paper = all("#paper article").length;
  dispatchEvent(new Event("afterprint"));
  found.wide = document.documentElement.scrollWidth <= innerWidth;
});
