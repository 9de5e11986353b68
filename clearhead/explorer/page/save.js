// Saves what a panel shows as one self-contained HTML page: no scripts, styles in the file, canvases as images.
import { button, download, make } from "./tools.js";

// Create a button that saves the answer line and the stage of the current panel.
export const saveButton = (name) => button("Save as one page", async () => download(`${name}.html`, new Blob([await standalonePage()], { type: "text/html" })), { title: "Save what is shown here as one HTML file" });

export async function standalonePage() {
  const column = document.querySelector(".stage-column"), copy = column.cloneNode(true), styles = await Promise.all(["report.css", "explore.css"].map(async (name) => (await fetch(name)).text()));
  const canvases = column.querySelectorAll("canvas");
  copy.querySelectorAll("canvas").forEach((canvas, i) => canvas.replaceWith(make("img", { src: canvases[i].toDataURL(), alt: "", width: canvases[i].clientWidth, height: canvases[i].clientHeight })));
  // Fields become their values, which a copy of a field does not have.
  const FIELDS = "select, textarea, input[type=number]", values = [...column.querySelectorAll(FIELDS)].map((input) => (input.matches("select") ? input.selectedOptions[0]?.textContent ?? "" : input.value));
  copy.querySelectorAll(FIELDS).forEach((input, i) => input.replaceWith(make("b", { textContent: values[i] })));
  for (const element of copy.querySelectorAll("[hidden], input, .saving, .act, .tour-links, .choices button[aria-pressed=false], dialog, .pane-note")) element.remove();
  for (const element of copy.querySelectorAll("button, [tabindex]")) for (const name of ["tabindex", "role"]) element.removeAttribute(name);
  for (const element of copy.querySelectorAll("button")) { const span = make("span", { className: element.className, title: element.title }, ...element.childNodes); span.style.cssText = element.style.cssText; element.replaceWith(span); }
  for (const link of copy.querySelectorAll("a")) link.replaceWith(make("span", {}, ...link.childNodes));
  // A saved page keeps the colors that its cells were computed for.
  const root = getComputedStyle(document.documentElement), names = new Set([...styles.join("").matchAll(/(--[a-z-]+):/g)].map(([, name]) => name)), isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const colors = [...names].map((name) => `${name}: ${root.getPropertyValue(name)} !important;`).join(" "), model = document.querySelector(".subject select")?.value ?? "";
  copy.prepend(make("p", { className: "note", textContent: `clearhead explorer · ${model} · ${document.title}` }));
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="${isDark ? "dark" : "light"}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>${document.title}</title>
<style>${styles.join("\n")}
:root { ${colors} }</style>
</head>
<body>
${copy.outerHTML}
</body>
</html>
`;
}
