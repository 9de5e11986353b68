// The search box: hides what does not contain every word, and the headings that are left with nothing under them.
// Dark begins as the reader's system has it.
const main = document.querySelector("main");
const box = document.getElementById("search");
const told = document.getElementById("found");
const entries = [...main.querySelectorAll("article"), ...main.querySelectorAll(".wrong tbody > tr")].map((element) => [
  element,
  `${element.id} ${element.textContent}`.toLowerCase().replace(/\s+/g, " "),
]);

function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const [element, text] of entries) {
    element.hidden = !words.every((word) => text.includes(word));
    if (!element.hidden && element.matches("article")) found += 1;
  }
  for (const heading of main.querySelectorAll(":scope > h2, :scope > h3")) {
    if (!heading.id.startsWith("document-")) continue;
    let next = heading.nextElementSibling;
    let empty = true;
    while (next && !next.matches(heading.matches("h2") ? "h2" : "h2, h3")) {
      if (next.matches("article") && !next.hidden) empty = false;
      next = next.nextElementSibling;
    }
    heading.hidden = empty;
  }
  main.classList.toggle("searching", words.length > 0);
  told.textContent = words.length ? `${found} found` : "";
}

box.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box) {
    event.preventDefault();
    box.focus();
  } else if (event.key === "Escape") {
    box.value = "";
    search();
  }
});
document.getElementById("dark").checked = matchMedia("(prefers-color-scheme: dark)").matches;
search();
