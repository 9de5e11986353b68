// A drawing pad. Strokes are lists of points, which fit into an address; `bytes` is the image for the model.
import { make } from "./tools.js";

const SIDE = 32, PAD_SIDE = 288, STROKE_WIDTH = 3.2; // in pixels: the image, the pad, and a stroke in the image

export function drawingPad(onChange, text = "") {
  const canvas = make("canvas", { width: PAD_SIDE, height: PAD_SIDE, className: "pad", tabIndex: 0, role: "img", ariaLabel: "Draw a digit here with the pointer; Backspace removes the last stroke, Delete clears" });
  const small = make("canvas", { width: SIDE, height: SIDE });
  let strokes = parse(text), stroke = null;

  function paint(target, side) {
    const pen = target.getContext("2d", { willReadFrequently: true }), scale = side / SIDE;
    Object.assign(pen, { fillStyle: "#303030", strokeStyle: "#f0f0f0", lineWidth: STROKE_WIDTH * scale, lineCap: "round", lineJoin: "round" });
    pen.fillRect(0, 0, side, side);
    for (const points of strokes) {
      pen.beginPath();
      points.forEach(([x, y], i) => (i ? pen.lineTo(x * scale, y * scale) : pen.moveTo(x * scale, y * scale)));
      if (points.length === 1) pen.lineTo(points[0][0] * scale + 0.01, points[0][1] * scale);
      pen.stroke();
    }
  }
  const draw = () => { paint(canvas, PAD_SIDE); paint(small, SIDE); };
  const edit = (newStrokes) => { strokes = newStrokes; draw(); onChange(); };
  const pointOf = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top].map((pixels) => Math.round(((10 * pixels) / frame.width) * SIDE) / 10);
  };
  canvas.addEventListener("pointerdown", (event) => { stroke = [pointOf(event)]; canvas.setPointerCapture(event.pointerId); edit([...strokes, stroke]); });
  canvas.addEventListener("pointermove", (event) => {
    if (!stroke) return;
    const [x, y] = pointOf(event), [a, b] = stroke.at(-1);
    if (Math.hypot(x - a, y - b) < 0.8) return;
    stroke.push([x, y]);
    edit(strokes);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { stroke = null; });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Backspace") edit(strokes.slice(0, -1));
    else if (event.key === "Delete") edit([]);
    else return;
    event.preventDefault();
  });
  if (!strokes.length) strokes = parse("11,7 16,5 20,8 19,13 14,16 19,18 21,23 16,27 10,25"); // a three
  draw();
  const button = (label, act) => make("button", { type: "button", className: "act", textContent: label, on: { click: act } });
  return {
    box: make("div", { className: "padded" }, canvas, make("div", { className: "form tight" }, button("Undo", () => edit(strokes.slice(0, -1))), button("Clear", () => edit([])))),
    canvas,
    strokes: () => strokes.map((points) => points.map((point) => point.join(",")).join(" ")).join(";"),
    bytes() {
      const { data } = small.getContext("2d").getImageData(0, 0, SIDE, SIDE);
      return btoa(String.fromCharCode(...Array.from({ length: SIDE * SIDE }, (_, i) => data[4 * i])));
    },
    count: () => strokes.length,
  };
}

const parse = (text) => text.split(";").map((line) => line.trim().split(/\s+/).map((point) => point.split(",").map(Number)).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y))).filter((points) => points.length);
