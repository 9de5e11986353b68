// The answer line: the input in small, the output in large letters; every token can be pointed at and selected.
import { make } from "./tools.js";

const isMark = (token) => /^(<.*>|\[.*\])$/.test(token.trim());

// Create the nodes of one token: the spaces before it unless it begins the line, its span, and a break after the mark of
// a line break. `separator` is the text between any two tokens.
function span(token, name, properties, separator, isFirst) {
  const text = separator + token.replace(/␣/g, " "), word = text.trimStart() || text;
  const element = make("span", { className: `tok${isMark(token) ? " mark" : ""}`, ...properties }, word);
  element.dataset.token = name;
  return { element, nodes: [isFirst ? "" : text.slice(0, text.length - word.length), element, ...(token.includes("⏎") ? [make("br")] : [])] };
}

// Return the answer box with `show(result, model)`; `onSelect(step)` is called with the index of an output token.
export function answerLine(onSelect) {
  const input = make("p", { className: "answer-input" }), output = make("p", { className: "answer-output", ariaLive: "polite" });
  const box = make("section", { className: "answer-line", ariaLabel: "Output" }, input, output);

  box.show = (result, selected = null) => {
    const { source, tokens, n_prompt: nPrompt, ids, separator, steps = [], first_step: first = 0 } = result;
    const isPair = source.length > 0, nGenerated = tokens.length - nPrompt, focused = [...output.querySelectorAll(".tok")].indexOf(document.activeElement);
    input.replaceChildren(...(isPair ? source : tokens.slice(0, nPrompt)).flatMap((token, i) => span(token, `${isPair ? "s" : "t"}${i}`, { title: `${isPair ? "source " : ""}position ${i}, id ${(isPair ? result.source_ids : ids)[i]}` }, separator, i === 0).nodes));
    output.replaceChildren(...tokens.slice(nPrompt).flatMap((token, i) => {
      const step = steps[i - first], sure = step?.probability ?? 1;
      const { element, nodes } = span(token, `t${nPrompt + i}`, { role: "button", tabIndex: 0, title: `position ${nPrompt + i}, id ${ids[nPrompt + i]}${step ? `, probability ${sure.toFixed(3)}${step.rank ? `, rank ${step.rank + 1}` : ""}` : ""}` }, separator, i === 0);
      element.classList.toggle("unsure", sure < 0.5);
      element.setAttribute("aria-pressed", String(selected === i));
      element.addEventListener("click", () => onSelect(i));
      element.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onSelect(i); } });
      return nodes;
    }), ...(nGenerated ? [] : [make("span", { className: "tok mark", textContent: steps.length || result.next ? "nothing generated yet" : "" })]));
    output.querySelectorAll(".tok")[focused]?.focus();
    output.hidden = !nGenerated && !result.next;
    input.scrollTop = input.scrollHeight; // the end of a long prompt, which is what the output answers
    output.classList.toggle("long", tokens.slice(nPrompt).join("").length > 90);
  };
  box.text = (small, large) => { input.textContent = small; output.hidden = false; output.replaceChildren(large); };
  return box;
}
