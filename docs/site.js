// A click on a figure shows it in full, as on a code host.
for (const figure of document.querySelectorAll("article img")) {
  if (figure.closest("a") || figure.src.startsWith("data:")) continue;
  const link = document.createElement("a");
  link.href = figure.src;
  figure.replaceWith(link);
  link.append(figure);
}
// Above a table in a "searchable" box, a field that hides the rows without the words typed into it.
for (const box of document.querySelectorAll(".searchable")) {
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Search the table";
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of box.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  box.prepend(field);
}
