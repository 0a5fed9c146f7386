// A click on a figure shows it in full, as on a code host.
for (const figure of document.querySelectorAll("article img")) {
  if (figure.closest("a") || figure.src.startsWith("data:")) continue;
  const link = document.createElement("a");
  link.href = figure.src;
  figure.replaceWith(link);
  link.append(figure);
}
// Short words of code stay in one line: browsers would break `--size` at its hyphens.
for (const code of document.querySelectorAll("article :not(pre) > code")) {
  if (code.children.length) continue;
  const pieces = code.textContent.split(/( +)/).map((word) => {
    if (word.length >= 24 || !word.trim()) return word;
    const piece = document.createElement("span");
    piece.textContent = word;
    piece.style.whiteSpace = "nowrap";
    return piece;
  });
  code.replaceChildren(...pieces);
}
