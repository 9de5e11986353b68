// The answer of a speech model: the recognized digits on the time axis of the recording; a click plays from there.
import { draw, make } from "./tools.js";

const W = 640, H = 64;

export function soundLine(answer, { symbols, seconds, envelope }, player) {
  const x = (time) => (time / seconds) * W, peak = Math.max(1e-3, ...envelope);
  const svg = draw("svg", { class: "wave", viewBox: `0 0 ${W} ${H + 20}`, role: "img", "aria-label": `${symbols.map(({ text, end }) => `${text} ended at ${end.toFixed(2)} s`).join(", ")}` });
  svg.append(draw("path", { class: "envelope", d: envelope.map((value, i) => `M${((i + 0.5) / envelope.length) * W} ${H / 2 - (value / peak) * (H / 2)}v${Math.max(1, (value / peak) * H)}`).join("") }),
    draw("path", { class: "axis", d: `M0 ${H}H${W}` }));
  for (let t = 0; t <= seconds; t += 0.5) svg.append(draw("text", { x: Math.min(W - 2, x(t)), y: H + 15, "text-anchor": t === 0 ? "start" : t + 0.5 > seconds ? "end" : "middle" }, `${t} s`));
  for (const { text, start, end } of symbols) svg.append(draw("path", { class: "mark", d: `M${x(end)} 0V${H}` }, draw("title", {}, `${text}: ${start.toFixed(2)} to ${end.toFixed(2)} s`)));
  const cursor = draw("path", { class: "cursor", d: `M0 0V${H}` });
  svg.append(cursor);
  svg.addEventListener("click", (event) => { const frame = svg.getBoundingClientRect(); player.currentTime = ((event.clientX - frame.left) / frame.width) * seconds; player.play(); });
  player.ontimeupdate = () => cursor.setAttribute("transform", `translate(${x(player.currentTime)} 0)`);
  answer.text(`${seconds.toFixed(2)} s of sound; the times are the ends of the digits`, make("span", {}, ...symbols.map(({ text, end, probability }) => make("span", { className: "tok heard", title: `probability ${probability.toFixed(3)}` }, text, make("small", { textContent: `${end.toFixed(2)} s` })))));
  answer.querySelector("svg.wave")?.remove();
  answer.append(svg);
}
