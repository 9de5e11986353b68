report(async () => {
  await ready("0/3/Tokens");
  key("ArrowLeft");
  await ready("0/2/Tokens");
  all(".query .token")[1501].click();
  await row(1501);
  results.row = weightTable();
  results.warm = all(".token.warm").length;

  key("2");
  await ready("0/2/Matrix");
  const largest = ink(find(".matrix canvas"));
  results.choices = all("#legend button").map((element) => element.textContent);
  for (let i = 0; i < 7; i++) button("+", "#legend").click();
  results.zoomed = find(".matrix").classList.contains("zoomed");
  results.close = all("#legend button").map((element) => element.textContent);
  key("ArrowLeft");
  await ready("0/1/Matrix");
  results.stays = find(".matrix").classList.contains("zoomed");
  key("ArrowRight");
  await ready("0/2/Matrix");
  button("all", "#legend").click();
  results.out = !find(".matrix").classList.contains("zoomed");
  button("mean", "#legend").click();
  await pause(100);
  results.inks = [largest, ink(find(".matrix canvas"))];

  key("3");
  await ready("0/2/Lines");
  results.paths = all(".lines path").length;
  results.note = text("#legend");
});
