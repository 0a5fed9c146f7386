// A click on a figure shows it in full, as on a code host.
for (const figure of document.querySelectorAll("article img")) {
  if (figure.closest("a") || figure.src.startsWith("data:")) continue;
  const link = document.createElement("a");
  link.href = figure.src;
  figure.replaceWith(link);
  link.append(figure);
}
