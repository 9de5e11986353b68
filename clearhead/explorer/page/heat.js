// A labeled grid of numbers as a table: rows and columns have names, every cell a value, and the colors a scale.
import { make } from "./tools.js";

// "−.25", "1.0" or "104": short enough for a cell.
export const format = (value) => (value === null ? "" : Math.abs(value) < 0.005 ? ".00" : Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 0.995 ? value.toFixed(1) : value.toFixed(2)).replace("-", "−").replace(/^(−?)0\./, "$1.");
const whole = (value) => Number(value.toPrecision(3)).toString().replace("-", "−");

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);

// The color of a value, blue above zero and orange below, with black or white text, whichever has the greater contrast.
function paint(cell, value, largest, colors) {
  const share = value === null ? 0 : Math.sqrt(Math.min(1, Math.abs(value) / (largest || 1)));
  const end = value < 0 ? colors.low : colors.heat, mixed = colors.quiet.map((from, i) => Math.round(from + (end[i] - from) * 0.95 * share));
  const luminance = 0.2126 * linear(mixed[0]) + 0.7152 * linear(mixed[1]) + 0.0722 * linear(mixed[2]);
  cell.style.backgroundColor = `rgb(${mixed.join(" ")})`;
  cell.style.color = luminance > 0.179 ? "#000" : "#fff";
}

// Create a grid. `rows`: [{label, title?, token?}], `columns` likewise, `values`: numbers or null, row by row; `texts` are
// shown instead of the numbers. `title(i, j)` is the tooltip, `onClick(i, j)` makes cells buttons.
export function heatGrid({ caption, rows, columns, values, texts = null, largest = null, title = null, onClick = null, signed = true, unit = "", corner = "", className = "" }) {
  const most = largest ?? Math.max(1e-9, ...values.flat().filter((value) => value !== null).map(Math.abs));
  const colors = Object.fromEntries(["heat", "low", "quiet"].map((name) => [name, channels(theme(`--${name}`))]));
  const heading = ({ label, title: tip, token }, scope) => {
    const cell = make("th", { scope, title: tip ?? label }, make("span", { textContent: label }));
    if (token) cell.dataset.token = token;
    return cell;
  };
  const cellOf = (i, j) => {
    const value = values[i][j], text = texts ? texts[i][j] : value === undefined ? "" : format(value), td = make("td", { title: value === undefined ? "" : title ? title(i, j) : `${rows[i].label}, ${columns[j].label}: ${value === null ? "not computed" : whole(value)}${unit}` });
    if (value === undefined) return Object.assign(td, { className: "none" });
    paint(td, value, most, colors);
    td.append(onClick ? make("button", { type: "button", textContent: text, ariaLabel: td.title, on: { click: () => onClick(i, j) } }) : text);
    return td;
  };
  const isUpright = columns.every(({ label }) => [...label].length <= 2); // then the labels of narrow columns are not rotated
  const table = make("table", { className: `heat ${texts ? "words" : ""} ${isUpright ? "letters" : ""} ${className}` }, make("thead", {}, make("tr", {}, make("td", { className: "corner", textContent: corner.replace(/ (?=[↓→])/g, "\u00a0") }), ...columns.map((column) => heading(column, "col")))),
    make("tbody", {}, ...rows.map((row, i) => make("tr", {}, heading(row, "row"), ...columns.map((_, j) => cellOf(i, j))))));
  const box = make("figure", { className: "heat-figure" }, make("div", { className: "scroll" }, table), make("figcaption", {}, scaleBar(most, signed, unit), caption ?? ""));
  box.table = table;
  box.cell = (i, j) => table.tBodies[0].rows[i].cells[j + 1];
  return box;
}

// Scroll all grids of an element to the column of a token, with `room` pixels to its right.
export function scrollToColumn(element, token, room = 40) {
  for (const heading of element.querySelectorAll(`th[scope=col][data-token="${token}"]`)) {
    const box = heading.closest(".scroll");
    box.scrollLeft += heading.getBoundingClientRect().right + room - box.getBoundingClientRect().right;
  }
}

// The color scale of a grid, from its least to its greatest value.
function scaleBar(most, signed, unit) {
  return make("span", { className: "heat-scale" }, signed ? `−${whole(most)}` : "0", make("span", { className: signed ? "ramp both" : "ramp" }), `${whole(most)}${unit} `);
}
