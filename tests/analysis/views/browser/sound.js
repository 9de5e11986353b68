report(async () => {
  await ready("0/2/Image");
  results.captions = all(".patches figcaption").map((caption) => caption.textContent);
  results.width = find(".time-line").viewBox.baseVal.width;
  results.axis = all(".time-line text:not(.symbol)").map((label) => label.textContent);
  results.symbols = all(".time-line text.symbol").map((label) => [label.textContent, Number(label.getAttribute("x"))]);
  const player = find("audio");
  if (!(player.duration > 0)) await new Promise((resolve) => player.addEventListener("loadedmetadata", resolve));
  results.seconds = player.duration;
});
