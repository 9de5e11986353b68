report(async () => {
  await ready("2/3/Tokens and matrix");
  Object.assign(found, { title: text("h1"), facts: text("#facts"), start: text("#where"), thumbs: all(".thumb").length });

  find('.thumb[data-at="1/2"]').click();
  await ready("1/2/Tokens and matrix");
  found.clicked = [text("#where"), pressed()];
  all(".query .token")[9].click();
  await row(9);
  found.row9 = looks();
  found.chosen = all(".token.chosen").map((one) => one.textContent);
  await until(() => find("#adds table"));
  found.adds = all("#adds tr").map((line) => line.textContent);

  key("ArrowLeft");
  await ready("1/1/Tokens and matrix");
  found.left = [text("#where"), pressed()];
  key("ArrowUp");
  await ready("0/1/Tokens and matrix");
  await pause(50);
  found.up = text("#where");
  found.row9above = looks();
  key("a");
  await ready("0/3/Tokens and matrix");
  found.mean = text("#where");
  key("a");
  await ready("0/1/Tokens and matrix");
  found.back = text("#where");
  key("]");
  await row(10);
  found.next = looks();

  const third = all(".query .token")[3];
  third.focus();
  key("ArrowRight", third);
  found.focused = document.activeElement.dataset.at;
  key("Enter", document.activeElement);
  await row(4);
  found.selected = all('[aria-selected="true"]').map((one) => one.dataset.at);

  const canvas = find(".matrix canvas");
  canvas.focus();
  key("ArrowRight", canvas);
  key("ArrowDown", canvas);
  await until(() => text("#detail").includes("Under the pointer"));
  found.pointed = all("#detail .note")[0].textContent;
  found.ink = ink(canvas);

  key("2");
  await ready("0/1/Lines");
  found.paths = all(".lines path").length;
  found.labels = all(".lines text").length;
  key("a");
  await ready("0/3/Lines");
  found.together = [text("#where"), all(".lines path").length, new Set(all(".lines path").map((path) => path.style.stroke)).size];
  found.colors = all(".color").map((one) => one.textContent);
  key("a");
  await ready("0/1/Lines");

  key("?");
  found.help = find("#help").open;
  find("#help button").click();
  await until(() => !find("#help").open);

  button("entropy", ".measures th").click();
  found.sorted = all(".measures tbody tr").map((line) => Number(line.children[5].textContent));
  all(".measures tbody tr")[0].click();
  await pause(50);
  found.current = all('.measures tr[aria-current="true"]').length;
  found.address = location.hash;
  found.more = all("#more canvas").map(ink);
  found.named = all("button").every((one) => (one.getAttribute("aria-label") || one.textContent).trim());
});
