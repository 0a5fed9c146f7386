// A click on a figure shows it in full, as on a code host.
for (const figure of document.querySelectorAll("article img")) {
  if (figure.closest("a") || figure.src.startsWith("data:")) continue;
  const link = document.createElement("a");
  link.href = figure.src;
  figure.replaceWith(link);
  link.append(figure);
}
// A short piece of code stays in one line: browsers would break `--size` at its hyphens.
for (const code of document.querySelectorAll("article :not(pre) > code")) {
  if (code.textContent.length < 24) code.style.whiteSpace = "nowrap";
}
