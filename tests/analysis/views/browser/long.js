report(async () => {
  await ready("0/3/Tokens");
  key("ArrowLeft");
  await ready("0/2/Tokens");
  all(".query .token")[1501].click();
  await row(1501);
  found.row = looks();
  found.warm = all(".token.warm").length;

  key("2");
  await ready("0/2/Matrix");
  const largest = ink(find(".matrix canvas"));
  found.choices = all("#legend button").map((one) => one.textContent);
  for (let i = 0; i < 7; i++) button("+", "#legend").click();
  found.zoomed = find(".matrix").classList.contains("zoomed");
  found.close = all("#legend button").map((one) => one.textContent);
  key("ArrowLeft");
  await ready("0/1/Matrix");
  found.stays = find(".matrix").classList.contains("zoomed");
  key("ArrowRight");
  await ready("0/2/Matrix");
  button("all", "#legend").click();
  found.out = !find(".matrix").classList.contains("zoomed");
  button("mean", "#legend").click();
  await pause(100);
  found.inks = [largest, ink(find(".matrix canvas"))];

  key("3");
  await ready("0/2/Lines");
  found.paths = all(".lines path").length;
  found.note = text("#legend");
});
