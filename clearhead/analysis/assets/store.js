// The data of the page: weights as bytes, unpacked when a layer is first looked at.
// A code c of n bits stands for the weight (c / (2^n - 1))^2; colors use the code itself, so small weights show.

// `data` and `signal` come from what stands around these files: the page, or the module that others import.

async function unpack(text, bits) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  return bits === 16 ? new Uint16Array(raw) : new Uint8Array(raw);
}

// Halves a matrix: each new cell is the largest, or the mean, of the (up to) four that it covers.
// A mean is one of weights, not of codes: the codes are squared, averaged, and rooted again.
function halved({ codes, rows, columns }, pool) {
  const R = Math.ceil(rows / 2), C = Math.ceil(columns / 2), out = new codes.constructor(R * C);
  for (let i = 0; i < R; i++) {
    const upper = 2 * i * columns, lower = 2 * i + 1 < rows ? upper + columns : upper;
    for (let j = 0; j < C; j++) {
      const left = 2 * j, right = 2 * j + 1 < columns ? left + 1 : left;
      const a = codes[upper + left], b = codes[upper + right], c = codes[lower + left], d = codes[lower + right];
      out[i * C + j] = pool === "largest"
        ? Math.max(a, b, c, d)
        : Math.round(Math.sqrt((a * a + b * b + c * c + d * d) / 4));
    }
  }
  return { codes: out, rows: R, columns: C };
}

// Every weight is at hand.
class FullMatrix {
  constructor(rows, columns, bits, codes) {
    Object.assign(this, { rows, columns, codes, top: 2 ** bits - 1 });
    this.pyramids = { largest: [this], mean: [this] };
  }

  weight(i, j) { return (this.codes[i * this.columns + j] / this.top) ** 2; }

  // The keys of one query with the largest weights, largest first.
  best(i, n) {
    const start = i * this.columns, row = this.codes.subarray(start, start + this.columns);
    let found = [];
    let least = 0;
    for (let j = 0; j < row.length; j++) {
      if (row[j] <= least) continue;
      found.push(j);
      if (found.length >= 4 * n + 64) {
        found = found.sort((a, b) => row[b] - row[a]).slice(0, n);
        least = row[found[n - 1]];
      }
    }
    return found.sort((a, b) => row[b] - row[a]).slice(0, n).map((key) => ({ key, weight: this.weight(i, key) }));
  }

  // The matrix with cells of 2^depth × 2^depth put together.
  level(depth, pool) {
    const pyramid = this.pyramids[pool];
    while (pyramid.length <= depth) pyramid.push(halved(pyramid[pyramid.length - 1], pool));
    return pyramid[depth];
  }
}

// Tiles, and for each query the keys that matter most; what is not among those is known by its tile's mean.
class Overview {
  constructor(rows, columns, pack, [largest, mean, keys, weights]) {
    Object.assign(this, { rows, columns, keys, weights, keysPerRow: pack.keys_per_row, tile: pack.tile, tiles: pack.tiles });
    this.pooled = { largest, mean };
    this.top = 255;
  }

  weight(i, j) {
    for (let k = i * this.keysPerRow; k < (i + 1) * this.keysPerRow; k++) {
      if (this.keys[k] === j) return (this.weights[k] / 255) ** 2;
    }
    const [tall, wide] = this.tile;
    return (this.pooled.mean[Math.floor(i / tall) * this.tiles[1] + Math.floor(j / wide)] / 255) ** 2;
  }

  best(i, n) {
    const found = [];
    for (let k = i * this.keysPerRow; k < i * this.keysPerRow + Math.min(n, this.keysPerRow); k++) {
      if (this.weights[k]) found.push({ key: this.keys[k], weight: (this.weights[k] / 255) ** 2 });
    }
    return found;
  }

  level(_, pool) { return { codes: this.pooled[pool], rows: this.tiles[0], columns: this.tiles[1] }; }
}

const unpacked = new Map();

// One head's matrix (a promise); the last number stands for the mean of all heads.
function matrix(number, head) {
  const name = `${number}/${head}`;
  if (!unpacked.has(name)) unpacked.set(name, open(data.maps[number], head));
  return unpacked.get(name);
}

async function open(picture, head) {
  const { pack } = picture, T = tokens(picture.rows).length, S = tokens(picture.columns).length;
  if (pack.matrices) return new FullMatrix(T, S, pack.bits, await unpack(pack.matrices[head], pack.bits));
  const parts = [[pack.largest, 8], [pack.mean, 8], [pack.keys, 16], [pack.weights, 8]];
  return new Overview(T, S, pack, await Promise.all(parts.map(([part, bits]) => unpack(part[head], bits))));
}

const tokens = (number) => data.texts[number];
const headName = (picture, head) => (head === picture.heads ? "mean of heads" : `head ${head}`);

// Colors from paper to ink, by code: 256 steps between a few stops, one list for light and one for dark.
const STOPS = {
  light: ["#ffffff", "#dde8f4", "#a9c8e6", "#5c98cf", "#1d5fa8", "#0c3566", "#061a36"],
  dark: ["#1a1e24", "#1c3049", "#24507e", "#3b80bd", "#74b7e8", "#bfe0f5", "#f6fcff"],
};
const isDark = matchMedia("(prefers-color-scheme: dark)");

function palette() {
  const stops = STOPS[isDark.matches ? "dark" : "light"].map((text) =>
    [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const table = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    const [r, g, b] = stops[low].map((value, c) => Math.round(value + (stops[low + 1][c] - value) * part));
    table[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return table;
}

// The code that gets the darkest color. In a large matrix a few cells would leave all others pale: they may saturate.
function ceiling(codes, top) {
  const counts = new Uint32Array(257);
  for (const code of codes) counts[Math.ceil((code / top) * 256)]++;
  let spare = codes.length > 4096 ? codes.length * 0.002 : 0;
  for (let step = 256; step > 0; step--) {
    spare -= counts[step];
    if (spare < 0) return (step / 256) * top;
  }
  return top;
}

// A part of a matrix as a small canvas, a pixel a cell.
function painted({ codes, columns }, [top, left, rows, wide], high, colors) {
  const canvas = Object.assign(document.createElement("canvas"), { width: wide, height: rows });
  const context = canvas.getContext("2d"), image = context.createImageData(wide, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < wide; j++) {
      const code = codes[(top + i) * columns + left + j];
      pixels[i * wide + j] = colors[Math.min(255, Math.round((code / high) * 255))];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// make("td", { className: "number" }, "0.5"): an element, its properties, its children.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const show = (weight) => (weight >= 0.0995 ? weight.toFixed(2) : weight >= 0.0005 ? weight.toFixed(3) : "<0.001");
