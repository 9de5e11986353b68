report(async () => {
  await ready("0/2/Picture");
  await until(() => find(".of"));
  found.start = text(".of");
  key("ArrowRight");
  await ready("0/0/Picture");
  const canvas = find(".patches canvas"), box = canvas.getBoundingClientRect();
  const middle = { clientX: box.left + (2.5 * box.width) / 4, clientY: box.top + (1.5 * box.height) / 3, bubbles: true };
  canvas.dispatchEvent(new MouseEvent("click", middle));
  await until(() => text(".of").startsWith("(1, 2)"));
  found.row = looks();
  found.ink = ink(canvas);
  key("ArrowDown", canvas);
  await until(() => text(".of").startsWith("(2, 2)"));
  found.below = text(".of");
  key("2");
  await ready("0/0/Matrix");
  found.matrix = ink(find(".matrix canvas"));
});
