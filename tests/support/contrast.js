// Returns the texts of a page whose contrast is below that of WCAG AA.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const luminance = ([r, g, b]) => [r, g, b].map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(parse(getComputedStyle(e).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), parse(getComputedStyle(document.documentElement).backgroundColor));
  };
  const opacity = (element) => { let o = 1; for (let e = element; e; e = e.parentElement) o *= Number(getComputedStyle(e).opacity); return o; };
  const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || element.closest("svg, canvas, script, style, noscript, .unseen, option, :disabled") || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (opacity(element) < 1) continue;
    const style = getComputedStyle(element), paper = background(element), ink = over(parse(style.color), paper);
    const [high, low] = [luminance(ink), luminance(paper)].sort((a, b) => b - a), ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)} ${text.slice(0, 40)} <${element.tagName.toLowerCase()} class="${element.className}">`);
  }
  return bad;
}
