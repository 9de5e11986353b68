// The difference of two texts, word by word.
import { make } from "./tools.js";

// Return the words of both texts: [word, "same" | "old" | "new"], from a longest common subsequence.
export function wordDiff(before, after) {
  const [a, b] = [before, after].map((text) => text.match(/\s*\S+|\s+$/g) ?? []), key = (word) => word.trim();
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) longest[i][j] = key(a[i]) === key(b[j]) ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const words = [];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && key(a[i]) === key(b[j])) { words.push([b[j++], "same"]); i++; } else if (i < a.length && (j === b.length || longest[i + 1][j] >= longest[i][j + 1])) words.push([a[i++], "old"]);
    else words.push([b[j++], "new"]);
  }
  return words;
}

// Create a line with the words of `after`; changed words are marked, and removed ones struck out. Spaces are not marked.
export const diffLine = (before, after) => make("span", {}, ...wordDiff(before, after).flatMap(([word, kind]) => {
  const text = word.trimStart();
  return [word.slice(0, word.length - text.length), kind === "same" ? text : make(kind === "old" ? "del" : "ins", { textContent: text })];
}));
