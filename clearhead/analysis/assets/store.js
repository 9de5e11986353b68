// Decodes the weights of the page, layer by layer on first use.
// A code c of n bits represents the weight (c / (2^n - 1))^2; colors use the code, which makes small weights visible.

// `data` and `signal` are defined by the surrounding page or ES module.

async function unpack(text, bits) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  return bits === 16 ? new Uint16Array(raw) : new Uint8Array(raw);
}

// Downsample a matrix by 2: each cell is the maximum or mean of up to four cells.
// The mean is that of the weights, so codes are squared before averaging.
function downsample({ codes, rows, columns }, pool) {
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

// A complete matrix.
class FullMatrix {
  constructor(rows, columns, bits, codes) {
    Object.assign(this, { rows, columns, codes, top: 2 ** bits - 1 });
    this.pyramids = { largest: [this], mean: [this] };
  }

  weight(i, j) { return (this.codes[i * this.columns + j] / this.top) ** 2; }

  // The keys of one query with the largest weights, largest first.
  best(i, n) {
    const start = i * this.columns, row = this.codes.subarray(start, start + this.columns);
    let keys = [];
    let least = 0;
    for (let j = 0; j < row.length; j++) {
      if (row[j] <= least) continue;
      keys.push(j);
      if (keys.length >= 4 * n + 64) {
        keys = keys.sort((a, b) => row[b] - row[a]).slice(0, n);
        least = row[keys[n - 1]];
      }
    }
    return keys.sort((a, b) => row[b] - row[a]).slice(0, n).map((key) => ({ key, weight: this.weight(i, key) }));
  }

  // The matrix, pooled over 2^depth × 2^depth cells.
  level(depth, pool) {
    const pyramid = this.pyramids[pool];
    while (pyramid.length <= depth) pyramid.push(downsample(pyramid[pyramid.length - 1], pool));
    return pyramid[depth];
  }
}

// A tiled matrix: pooled tiles, and the largest keys of each query. Other weights are the mean of their tile.
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
    const entries = [];
    for (let k = i * this.keysPerRow; k < i * this.keysPerRow + Math.min(n, this.keysPerRow); k++) {
      if (this.weights[k]) entries.push({ key: this.keys[k], weight: (this.weights[k] / 255) ** 2 });
    }
    return entries;
  }

  level(_, pool) { return { codes: this.pooled[pool], rows: this.tiles[0], columns: this.tiles[1] }; }
}

const unpacked = new Map();

// Return a promise of one head's matrix; index n_heads is the mean of all heads.
function matrix(number, head) {
  const name = `${number}/${head}`;
  if (!unpacked.has(name)) unpacked.set(name, open(data.maps[number], head));
  return unpacked.get(name);
}

async function open(map, head) {
  const { pack } = map, T = tokens(map.rows).length, S = tokens(map.columns).length;
  if (pack.matrices) return new FullMatrix(T, S, pack.bits, await unpack(pack.matrices[head], pack.bits));
  const parts = [[pack.largest, 8], [pack.mean, 8], [pack.keys, 16], [pack.weights, 8]];
  return new Overview(T, S, pack, await Promise.all(parts.map(([part, bits]) => unpack(part[head], bits))));
}

const tokens = (number) => data.texts[number];
const headName = (map, head) => (head === map.heads ? "mean of heads" : `head ${head}`);

// Color map by code: 256 steps between stops, for light and dark mode.
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

// The code of the darkest color. In a large matrix the largest 0.2 % of the cells saturate, so that the rest is visible.
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

// Draw a part of a matrix on a canvas, one pixel per cell.
function renderCells({ codes, columns }, [top, left, rows, wide], high, colors) {
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

// Create an element with properties and children: make("td", { className: "number" }, "0.5").
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const formatWeight = (weight) => (weight >= 0.0995 ? weight.toFixed(2) : weight >= 0.0005 ? weight.toFixed(3) : "<0.001");
