// Cost: sliders for sizes; what it costs part by part, how that grows, what limits it, and what fits.
import { Latest, ask, bytes, choices, count, draw, field, gauge, large, make, progress, ready, saving, seconds, slider, status, table } from "./tools.js";

const DEFAULTS = { kind: "decoder", d_model: 768, n_heads: 12, n_layers: 12, d_ff: 3072, vocab_size: 50257, tokens: 1024, batch: 1, dtype: "bfloat16", training: "", mask: "", memory: 80 };
const powers = (low, high) => Array.from({ length: 2 * (high - low) + 1 }, (_, i) => (i % 2 ? 3 * 2 ** (low + (i - 1) / 2 - 1) : 2 ** (low + i / 2)));
const SLIDERS = [
  ["tokens", "Tokens", powers(4, 17)], ["batch", "Batch", powers(0, 10)], ["d_model", "Width (d_model)", powers(6, 14)], ["n_heads", "Heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]],
  ["n_layers", "Layers", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128]], ["d_ff", "Feed-forward (d_ff)", powers(6, 16)],
  ["vocab_size", "Vocabulary", [64, 256, 1000, 4000, 8000, 16000, 32000, 50257, 64000, 100000, 128000, 200000, 256000]], ["memory", "Memory, GiB", [4, 8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288]],
];
const CEILINGS = { bandwidth: "memory traffic" };

export function open(box, given, { signal, remember }) {
  const state = { ...DEFAULTS, ...given }, latest = new Latest(signal), slow = new Latest(signal), fits = new Latest(signal);
  for (const [name] of SLIDERS) state[name] = Number(state[name]);
  const out = make("div", { className: "answer" }), curves = make("div"), wrong = make("p", { className: "caret", role: "alert" }), room = make("p");
  const select = (words, name, options) => field(words, make("select", { on: { change(event) { go({ [name]: event.target.value }); } } },
    ...options.map((value) => make("option", { value, textContent: value, selected: value === state[name] }))));
  box.append(make("h1", { textContent: "Cost" }),
    make("p", { className: "lead", textContent: "The real module runs on tensors that have sizes and no numbers. Operations are those of the matrix products; time is predicted for one GPU." }),
    make("div", { className: "form" }, choices("Model", [["decoder", "Decoder"], ["encoder", "Encoder"]], state.kind, (kind) => go({ kind })),
      choices("What runs", [["", "Forward"], ["yes", "Training step"]], state.training, (training) => go({ training })), select("Numbers", "dtype", ["bfloat16", "float16", "float32"]),
      field("Extra mask", make("input", { type: "text", className: "code", value: state.mask, placeholder: "causal() & window(256, 0)", on: { input(event) { go({ mask: event.target.value }); } } }))),
    make("div", { className: "sliders" }, ...SLIDERS.map(([name, words, steps]) => slider(words, steps, state[name], (value) => go({ [name]: value })))),
    wrong, out, make("h2", { textContent: "What fits" }), room, make("h2", { textContent: "Growth with the length" }), curves);

  function go(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    const body = { ...state, training: state.training === "yes" };
    latest.run((stop) => ask("cost", body, { signal: stop }), show, (error) => { wrong.textContent = error.message; out.classList.add("old"); ready("refused"); });
    slow.run((stop) => ask("growth", body, { signal: stop, onProgress: progress }), (found) => { status(""); grow(found.rows); }, () => curves.replaceChildren(), 500);
    fits.run((stop) => ask("fits", body, { signal: stop }), ({ batch, tokens, at_end: end }) => {
      room.textContent = `In ${state.memory} GiB: at most ${count(batch)} sequences of ${count(state.tokens)} tokens, or ${count(tokens)} tokens in a batch of ${count(state.batch)}${end ? " (and perhaps more: the search ends there)" : ""}.`;
      room.dataset.ready = "yes";
    }, (error) => { room.textContent = error.message; }, 500);
  }

  function show(found) {
    wrong.textContent = "";
    out.classList.remove("old");
    const { time, memory } = found, all = Object.entries(time.spent), whole = all.reduce((sum, [, s]) => sum + s, 0);
    out.replaceChildren(
      make("div", {}, table("Totals", ["", ""], [
        ["Parameters", count(found.parameters)], ["FLOPs, forward", large(found.flops.forward)], ["FLOPs, backward", large(found.flops.backward)],
        ["Bytes accessed, forward", bytes(found.bytes_accessed)], ["Kernel launches", count(found.kernel_launches)], [`Time on ${time.on}`, seconds(time.seconds)], ["Limited by", time.bottleneck],
        ["Peak memory", `${bytes(memory.peak)}, ${found.fits ? "fits" : "does not fit"}`], ["KV cache", bytes(memory.kv_cache)], ["Most FLOPs in", found.bottleneck],
      ]), bars("Where the time goes", all.map(([name, s]) => [name.replaceAll("_", " "), s / (whole || 1), seconds(s)]))),
      make("div", {}, bars(`Peak memory, ${memory.peak_op}`, Object.entries(memory.peak_breakdown).map(([name, n]) => [name, n / (memory.peak || 1), bytes(n)]))),
      make("div", {}, table("Memory", ["", ""], Object.entries(memory).filter(([name]) => !name.startsWith("peak_")).map(([name, n]) => [name.replaceAll("_", " "), bytes(n)]))),
      make("div", { className: "scroll whole" }, table("Part by part", ["part", "parameters", "forward", "bytes accessed", "saved", "time", "limited by"], found.parts.map((part) => {
        const limit = found.ceilings[part.part];
        return [part.part, count(part.parameters), large(part.forward), bytes(part.bytes_accessed), bytes(part.saved), limit ? seconds(limit.seconds) : "", limit ? CEILINGS[limit.by] ?? limit.by : ""];
      }))));
    ready(`cost ${found.parameters} ${state.tokens}`);
  }

  function grow(rows) {
    const series = [["flops", "FLOPs", large], ["peak", "Peak memory", bytes], ["seconds", "Time", seconds]];
    curves.replaceChildren(make("div", { className: "answer" }, ...series.map(([name, words, show]) => { const svg = curve(rows, name, words, show); return make("figure", {}, svg, make("figcaption", {}, `${words} `, saving(words, svg))); })));
    curves.dataset.ready = rows.length;
  }

  go({});
}

const bars = (caption, rows) => make("table", { className: "plain gauges" }, make("caption", { textContent: caption }), make("tbody", {},
  ...rows.map(([name, share, words]) => make("tr", {}, make("th", { scope: "row", textContent: name }), gauge(share), make("td", { textContent: words })))));

// Both axes by powers; between neighbours stands how many times more it is when the length doubles.
function curve(rows, name, words, show) {
  const [W, H, left, right, top, base] = [360, 210, 62, 18, 22, 30], xs = rows.map(({ tokens }) => Math.log2(tokens)), ys = rows.map((row) => Math.log2(Math.max(row[name], 1e-12)));
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (at) => left + ((at - x0) / (x1 - x0 || 1)) * (W - left - right), y = (at) => H - base - ((at - y0) / (y1 - y0 || 1)) * (H - base - top);
  const svg = draw("svg", { class: "curve", viewBox: `0 0 ${W} ${H}`, role: "img" });
  svg.append(draw("title", {}, `${words} by length: ${rows.map((row) => `${row.tokens} tokens, ${show(row[name])}`).join("; ")}`),
    draw("path", { class: "axis", d: `M${left} ${top - 8}V${H - base}H${W - right}` }),
    draw("polyline", { class: "line", points: xs.map((at, i) => `${x(at)},${y(ys[i])}`).join(" ") }));
  rows.forEach((row, i) => {
    svg.append(draw("circle", { class: "dot", cx: x(xs[i]), cy: y(ys[i]), r: 3.5 }), draw("text", { x: x(xs[i]), y: H - base + 16, "text-anchor": "middle" }, large(row.tokens)));
    if (i === 0 || i === rows.length - 1) svg.append(draw("text", { x: left - 6, y: y(ys[i]) + 4, "text-anchor": "end" }, show(row[name])));
    if (i) svg.append(draw("text", { class: "times", x: (x(xs[i - 1]) + x(xs[i])) / 2, y: (y(ys[i - 1]) + y(ys[i])) / 2 - 8, "text-anchor": "end" }, `×${(row[name] / (rows[i - 1][name] || 1)).toFixed(2)}`));
  });
  return svg;
}
