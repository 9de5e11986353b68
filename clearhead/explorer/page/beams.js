// Beam search: every prefix that the search kept, as a tree, and the final hypotheses.
import { draw, make, saveButtons, slider } from "./tools.js";

// Return the elements of the view; `go(changes)` changes the width.
export function beams(result, width, go) {
  const svg = beamTree(result), control = slider("Width", [1, 2, 3, 4, 5, 6, 7, 8], width, (value) => go({ width: value }), { min: 1, max: 8, integer: true });
  return [make("div", { className: "form" }, control), make("figure", { className: "scroll" }, svg),
    make("p", { className: "note" }, "All prefixes that the search kept. Wider lines are more probable; the best hypothesis is highlighted. The score is the mean log-probability of the tokens. ", saveButtons("beams", svg)),
    make("ol", { className: "hypotheses" }, ...result.hypotheses.map(({ text, score, is_finished: isFinished }) => make("li", {}, make("b", { textContent: text || "(empty)" }), make("span", { className: "note", textContent: ` score ${score.toFixed(3).replace("-", "−")}${isFinished ? "" : ", unfinished"}` }))))];
}

// Draw a tree from left to right: one column per token, one row per leaf.
function beamTree({ nodes, hypotheses }) {
  const children = nodes.map(() => []), roots = [], best = new Set(hypotheses[0]?.nodes ?? []);
  nodes.forEach(({ parent }, i) => (parent === null ? roots : children[parent]).push(i));
  const shorten = (label) => (label.length > 14 ? `${label.slice(0, 13)}…` : label), labels = nodes.map(({ token }) => shorten(token.trim() || token));
  const [LETTER, GAP, H] = [7.4, 44, 24], points = [], longest = []; // of the labels of each depth
  const measure = (i, depth) => { longest[depth] = Math.max(longest[depth] ?? 1, labels[i].length); children[i].forEach((child) => measure(child, depth + 1)); };
  roots.forEach((root) => measure(root, 0));
  const lefts = longest.reduce((edges, length) => [...edges, edges.at(-1) + length * LETTER + GAP], [40]);
  let nLeaves = 0;
  const layOut = (i, depth) => {
    const ys = children[i].sort((a, b) => nodes[b].log_prob - nodes[a].log_prob).map((child) => layOut(child, depth + 1));
    const y = ys.length ? (ys[0] + ys.at(-1)) / 2 : nLeaves++ * H + 14;
    points[i] = [lefts[depth], y];
    return y;
  };
  const rootYs = roots.sort((a, b) => nodes[b].log_prob - nodes[a].log_prob).map((root) => layOut(root, 0)), middle = rootYs.length ? (rootYs[0] + rootYs.at(-1)) / 2 : 14;
  const width = lefts.at(-1), height = Math.max(30, nLeaves * H + 8);
  const svg = draw("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(draw("title", {}, `Beam search: ${hypotheses.map(({ text }) => text).join("; ")}`));
  nodes.forEach(({ parent, log_prob: logProb }, i) => {
    const [x, y] = points[i], [a, b] = parent === null ? [6, middle] : [points[parent][0] + labels[parent].length * LETTER + 4, points[parent][1]];
    svg.append(draw("path", { class: best.has(i) ? "best" : "", d: `M${a} ${b}C${(a + x) / 2 - 10} ${b} ${(a + x) / 2 - 20} ${y} ${x - 6} ${y}`, "stroke-width": (0.6 + 3.4 * Math.exp(logProb)).toFixed(2) }));
  });
  nodes.forEach(({ token, log_prob: logProb }, i) => {
    const [x, y] = points[i];
    svg.append(draw("text", { class: best.has(i) ? "best" : "", x: x - 2, y: y + 4 }, labels[i], draw("title", {}, `${token}: ${Math.exp(logProb).toFixed(3)}`)));
  });
  return svg;
}
