report(async () => {
  await ready("0/2/Image");
  results.captions = all(".patches figcaption").map((caption) => caption.textContent);
  results.width = find(".time-line").viewBox.baseVal.width;
  results.axis = all(".time-line text:not(.symbol)").map((label) => label.textContent);
  results.symbols = all(".time-line text.symbol").map((label) => [label.textContent, Number(label.getAttribute("x"))]);
  // The player decodes in another process, for which virtual time does not wait, so the header of its file is read.
  const file = Uint8Array.from(atob(find("audio").src.split(",")[1]), (letter) => letter.charCodeAt(0));
  const header = new DataView(file.buffer);
  results.seconds = header.getUint32(40, true) / header.getUint32(28, true);
});
