// The token under the pointer is highlighted in every view: elements with the same data-token, and views that listen.
// A token is named "s3" (source) or "t5" (prompt and output), with its position.
let current = null;

// Highlight a token, or nothing for null.
export function highlight(token) {
  if (token === current) return;
  current = token;
  for (const element of document.querySelectorAll(".token-hover")) element.classList.remove("token-hover");
  if (token) for (const element of document.querySelectorAll(`[data-token="${token}"]`)) element.classList.add("token-hover");
  document.dispatchEvent(new CustomEvent("tokenhover", { detail: token }));
}

// Call `act(token)` when the highlighted token changes, until the signal aborts.
export const onHighlight = (act, signal) => document.addEventListener("tokenhover", (event) => act(event.detail), { signal });

const tokenAt = (event) => event.target.closest?.("[data-token]")?.dataset.token ?? null;
// A view with its own hit test, such as a matrix, reports the token itself.
document.addEventListener("pointerover", (event) => { if (!event.target.closest?.("#view")) highlight(tokenAt(event)); });
document.addEventListener("focusin", (event) => { if (tokenAt(event)) highlight(tokenAt(event)); });
document.addEventListener("pointerleave", () => highlight(null));
