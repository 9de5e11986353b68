// Cost: sliders for sizes; predicted cost by part, its growth with the length, and what fits in memory.
import { Latest, ask, bytes, choices, count, draw, field, gauge, large, make, progress, readState, ready, routeError, saveButtons, seconds, slider, status, table } from "./tools.js";

const DEFAULTS = { kind: "decoder", d_model: 768, n_heads: 12, n_layers: 12, d_ff: 3072, vocab_size: 50257, tokens: 1024, batch: 1, dtype: "bfloat16", training: "", mask: "", memory: 80 };
const powers = (low, high) => Array.from({ length: 2 * (high - low) + 1 }, (_, i) => (i % 2 ? 3 * 2 ** (low + (i - 1) / 2 - 1) : 2 ** (low + i / 2)));
const SLIDERS = [
  ["tokens", "Tokens", powers(4, 17)], ["batch", "Batch", powers(0, 10)], ["d_model", "Width (d_model)", powers(6, 14)], ["n_heads", "Heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]],
  ["n_layers", "Layers", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128]], ["d_ff", "Feed-forward (d_ff)", powers(6, 16)],
  ["vocab_size", "Vocabulary", [64, 256, 1000, 4000, 8000, 16000, 32000, 50257, 64000, 100000, 128000, 200000, 256000]], ["memory", "Memory, GiB", [4, 8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288]],
];
const LARGEST = { tokens: 1 << 20, batch: 1 << 14, d_model: 16384, n_heads: 256, n_layers: 128, d_ff: 65536, vocab_size: 1 << 20, memory: 4096 };
const BOTTLENECKS = { "host wait": "waiting for the host to launch kernels" };
const CEILINGS = { bandwidth: "memory traffic" };
const PART_NAMES = { "blocks.*.norm1": "first norm", "blocks.*.norm2": "second norm", norm: "final norm", Decoder: "unembedding, final steps", Encoder: "steps of the whole model" };
const partName = (part) => PART_NAMES[part] ?? part.replace("blocks.*", "block").replace(/^block$/, "block, residual sums").replace(/^block\./, "").replace("feed_forward", "feed-forward").replace(/\.([qkvo])_proj$/, ", $1 projection").replace(".", ", ");
const MEMORY_NAMES = { attention_weights_naive: "attention weights, if stored", attention_statistics_fused: "statistics of fused attention", kv_cache: "KV cache" };

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial), latest = new Latest(signal), slow = new Latest(signal), fits = new Latest(signal);
  const out = make("div", { className: "answer" }), curves = make("div"), headline = make("p", { className: "answer-output headline", ariaLive: "polite" }), parts = make("div"), errorBox = make("p", { className: "caret", role: "alert" }), limits = make("p", { className: "note limits" }), boxes = {};
  const select = (label, name, options) => field(label, make("select", { on: { change(event) { go({ [name]: event.target.value }); } } },
    ...options.map((value) => make("option", { value, textContent: value, selected: value === state[name] }))));
  box.append(make("h1", { textContent: "Cost" }),
    make("p", { className: "lead", textContent: "The real module runs on fake tensors, which have shapes but no data. FLOPs count matrix products; the time is predicted for one GPU." }),
    make("div", { className: "form" }, choices("Model", [["decoder", "Decoder"], ["encoder", "Encoder"]], state.kind, (kind) => go({ kind })),
      choices("Pass", [["", "Forward"], ["yes", "Training step"]], state.training, (training) => go({ training })), select("Dtype", "dtype", ["bfloat16", "float16", "float32"]),
      (boxes.mask = field("Extra mask", make("input", { type: "text", className: "code", value: state.mask, size: 26, placeholder: "causal() & window(256, 0)", on: { input(event) { go({ mask: event.target.value }); } } })))),
    make("div", { className: "sliders" }, ...SLIDERS.map(([name, label, steps]) => (boxes[name] = slider(label, steps, state[name], (value) => go({ [name]: value }), { min: name === "memory" ? 0.1 : 1, max: LARGEST[name], integer: name !== "memory" })))),
    errorBox, headline, limits, out, make("h2", { textContent: "Growth with the length" }), curves, make("h2", { textContent: "Cost by part" }), make("p", { className: "note", textContent: "Sums over all blocks; every part without the parts inside it." }), parts);

  function go(changes) {
    Object.assign(state, changes);
    remember(state, DEFAULTS);
    const body = { ...state, training: state.training === "yes" };
    latest.run((stop) => ask("cost", body, { signal: stop }), show, (error) => { routeError(error, boxes, (message) => { errorBox.textContent = message; }); for (const old of [headline, out, parts, curves]) old.classList.add("old"); limits.textContent = ""; ready("error"); });
    if (!curves.childElementCount) curves.textContent = limits.textContent = "Computing …";
    slow.run((stop) => ask("cost_growth", body, { signal: stop, onProgress: progress }), (result) => { status(""); showGrowth(result.rows); }, () => {}, 500);
    fits.run((stop) => ask("largest_batch", body, { signal: stop }), ({ batch, tokens, is_search_limit: isSearchLimit }) => {
      limits.textContent = `In ${state.memory} GiB: at most ${count(batch)} sequences of ${count(state.tokens)} tokens, or ${count(tokens)} tokens in a batch of ${count(state.batch)}${isSearchLimit ? " (the search ends there; more may fit)" : ""}.`;
      limits.dataset.ready = "yes";
    }, () => {}, 500);
  }

  function show(result) {
    errorBox.textContent = "";
    for (const box of Object.values(boxes)) if (box.problem) box.problem("");
    for (const old of [headline, out, parts, curves]) old.classList.remove("old");
    const { time, memory } = result, components = Object.entries(time.breakdown), total = components.reduce((sum, [, s]) => sum + s, 0);
    headline.replaceChildren(seconds(time.seconds), make("small", { textContent: ` per ${state.training === "yes" ? "training step" : "forward pass"} on one ${time.machine}, limited by ${BOTTLENECKS[time.bottleneck] ?? time.bottleneck}` }), make("br"), bytes(memory.peak), make("small", { textContent: ` at the peak, which ${result.fits ? "fits" : "does not fit"} in ${state.memory} GiB` }));
    out.replaceChildren(
      make("div", {}, table("Totals", ["", ""], [
        ["Parameters", count(result.parameters)], ["FLOPs, forward", large(result.flops.forward)], ["FLOPs, backward", large(result.flops.backward)],
        ["Bytes accessed, forward", bytes(result.bytes_accessed)], ["Kernel launches", count(result.kernel_launches)],
        ["Most FLOPs in", partName(result.bottleneck)],
      ])), make("div", {}, bars("Time by component", components.map(([name, s]) => [name.replaceAll("_", " "), s / (total || 1), seconds(s)]))),
      make("div", {}, bars(`In memory at the peak`, Object.entries(memory.peak_breakdown).map(([name, n]) => [name, n / (memory.peak || 1), bytes(n)]))),
      make("div", {}, table("Memory", ["", ""], Object.entries(memory).filter(([name, n]) => name !== "peak" && !name.startsWith("peak_") && n > 0).map(([name, n]) => [MEMORY_NAMES[name] ?? name, bytes(n)]))));
    parts.replaceChildren(make("div", { className: "scroll whole" }, table("", ["part", "parameters", "FLOPs, forward", "bytes accessed", "saved for backward", "time", "limited by"], result.parts.map((part) => {
        const limit = result.ceilings[part.part];
        return [make("th", { scope: "row", textContent: partName(part.part), title: part.part }), count(part.parameters), large(part.forward), bytes(part.bytes_accessed), bytes(part.saved), limit ? seconds(limit.seconds) : "", limit ? CEILINGS[limit.bound] ?? limit.bound : ""];
      }))));
    ready(`cost ${result.parameters} ${state.tokens}`);
  }

  function showGrowth(rows) {
    const series = [["flops", "FLOPs", large], ["peak_memory", "Peak memory", bytes], ["seconds", "Time", seconds]];
    curves.replaceChildren(make("div", { className: "answer" }, ...series.map(([name, label, format]) => { const svg = curve(rows, name, label, format); return make("figure", {}, svg, make("figcaption", {}, `${label} `, saveButtons(label, svg))); })));
    curves.dataset.ready = rows.length;
  }

  go({});
}

const bars = (caption, rows) => make("table", { className: "plain gauges" }, make("caption", { textContent: caption }), make("tbody", {},
  ...rows.map(([name, share, text]) => make("tr", {}, make("th", { scope: "row", textContent: name }), gauge(share), make("td", { textContent: text })))));

// Draw a curve on logarithmic axes, with the growth factor between neighbors, whose lengths double.
function curve(rows, name, label, format) {
  const [W, H, left, right, top, base] = [360, 210, 62, 18, 22, 30], xs = rows.map(({ tokens }) => Math.log2(tokens)), ys = rows.map((row) => Math.log2(Math.max(row[name], 1e-12)));
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (W - left - right), y = (value) => H - base - ((value - y0) / (y1 - y0 || 1)) * (H - base - top);
  const svg = draw("svg", { class: "curve", viewBox: `0 0 ${W} ${H}`, role: "img" });
  svg.append(draw("title", {}, `${label} by length: ${rows.map((row) => `${row.tokens} tokens, ${format(row[name])}`).join("; ")}`),
    draw("path", { class: "axis", d: `M${left} ${top - 8}V${H - base}H${W - right}` }),
    draw("polyline", { class: "line", points: xs.map((value, i) => `${x(value)},${y(ys[i])}`).join(" ") }));
  rows.forEach((row, i) => {
    svg.append(draw("circle", { class: "dot", cx: x(xs[i]), cy: y(ys[i]), r: 3.5 }), draw("text", { x: x(xs[i]), y: H - base + 16, "text-anchor": "middle" }, large(row.tokens)));
    if (i === 0 || i === rows.length - 1) svg.append(draw("text", { x: left - 6, y: y(ys[i]) + 4, "text-anchor": "end" }, format(row[name])));
    if (i) svg.append(draw("text", { class: "times", x: (x(xs[i - 1]) + x(xs[i])) / 2, y: (y(ys[i - 1]) + y(ys[i])) / 2 - 8, "text-anchor": "end" }, `×${(row[name] / (rows[i - 1][name] || 1)).toFixed(2)}`));
  });
  return svg;
}
