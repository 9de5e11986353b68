report(async () => {
  await ready("2/3/Tokens and matrix");
  Object.assign(results, { title: text("h1"), facts: text("#facts"), start: text("#where"), thumbs: all(".thumb").length });

  find('.thumb[data-at="1/2"]').click();
  await ready("1/2/Tokens and matrix");
  results.clicked = [text("#where"), pressed()];
  all(".query .token")[9].click();
  await row(9);
  results.row9 = weightTable();
  results.chosen = all(".token.chosen").map((element) => element.textContent);
  await until(() => find("#adds table"));
  results.adds = all("#adds tr").map((line) => line.textContent);

  key("ArrowLeft");
  await ready("1/1/Tokens and matrix");
  results.left = [text("#where"), pressed()];
  key("ArrowUp");
  await ready("0/1/Tokens and matrix");
  await pause(50);
  results.up = text("#where");
  results.row9above = weightTable();
  key("a");
  await ready("0/3/Tokens and matrix");
  results.mean = text("#where");
  key("a");
  await ready("0/1/Tokens and matrix");
  results.back = text("#where");
  key("]");
  await row(10);
  results.next = weightTable();

  const third = all(".query .token")[3];
  third.focus();
  key("ArrowRight", third);
  results.focused = document.activeElement.dataset.at;
  key("Enter", document.activeElement);
  await row(4);
  results.selected = all('[aria-selected="true"]').map((element) => element.dataset.at);

  const canvas = find(".matrix canvas");
  canvas.focus();
  key("ArrowRight", canvas);
  key("ArrowDown", canvas);
  await until(() => text("#detail").includes("Under the pointer"));
  results.pointed = all("#detail .note")[0].textContent;
  results.ink = ink(canvas);

  key("2");
  await ready("0/1/Lines");
  results.paths = all(".lines path").length;
  results.labels = all(".lines text").length;
  key("a");
  await ready("0/3/Lines");
  results.together = [text("#where"), all(".lines path").length, new Set(all(".lines path").map((path) => path.style.stroke)).size];
  results.colors = all(".color").map((element) => element.textContent);
  key("a");
  await ready("0/1/Lines");

  key("?");
  results.help = find("#help").open;
  find("#help button").click();
  await until(() => !find("#help").open);

  button("entropy", ".measures th").click();
  results.sorted = all(".measures tbody tr").map((line) => Number(line.children[5].textContent));
  all(".measures tbody tr")[0].click();
  await pause(50);
  results.current = all('.measures tr[aria-current="true"]').length;
  results.address = location.hash;
  results.more = all("#more canvas").map(ink);
  results.named = all("button").every((element) => (element.getAttribute("aria-label") || element.textContent).trim());
});
