"""What the site adds to the pages as they stand on a code host: the pages at the root, the notebook, links, one check.

README.md becomes the first page, CONTRIBUTING.md, CHANGELOG.md and the notebook pages; links to files that are no pages
lose their address. After the build no page may ask another host for anything: scripts, styles, fonts or images.
"""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK = ROOT / "examples" / "attention_tour.ipynb"
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>|"""
    r"""<link\b[^>]*rel=["']?(?:stylesheet|preconnect|icon|preload)[^>]*href=["']?(?:https?:)?//[^>]*>"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root of the repository."""
    for name, page in AT_THE_ROOT.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    files.append(File.generated(config, "tour.md", content=notebook_as_page()))
    return files


def notebook_as_page() -> str:
    """The notebook in Markdown, with its saved outputs."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            image = data.get("image/png", "").replace("\n", "")
            parts.append(
                f"![Output](data:image/png;base64,{image})" if image else f"```\n{text}\n```"
            )
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links from and to the root at the pages, and take away those to files that the site does not have."""
    folder = (
        ROOT
        if page.file.src_uri in AT_THE_ROOT.values()
        else (ROOT / "docs" / page.file.src_uri).parent
    )

    def link(found: re.Match[str]) -> str:
        text, address, anchor = found[1], found[2], found[3] or ""
        if re.match(r"\w+:", address) or not address:
            return found[0]
        target = (folder / address).resolve().relative_to(ROOT).as_posix()
        uri = AT_THE_ROOT.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            return text if not found[0].startswith("!") else found[0]
        up = "../" * page.file.src_uri.count("/")
        return f"{'!' * found[0].startswith('!')}[{text}]({up}{uri}{anchor})"

    markdown = re.sub(r"!?\[([^\]]*)\]\(([^)#\s]*)(#[\w-]+)?\)", link, markdown)
    return markdown.replace('src="docs/', 'src="')


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that fetches anything from elsewhere, or leaves out a public name of `dgt`."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := FETCHED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.name} asks another host: {found[0]}")
    written = "".join(
        page.read_text(encoding="utf-8") for page in Path(config.site_dir, "api").glob("*.html")
    )
    public = (
        (ROOT / "src" / "dgt" / "__init__.py")
        .read_text(encoding="utf-8")
        .partition("__all__ = [")[2]
    )
    missing = [
        name
        for name in re.findall(r'"(\w+)"', public)
        if not re.search(rf'id="dgt\.[\w.]*\b{name}"', written)
    ]
    if missing:
        raise PluginError(f"no page of docs/api has the public names {', '.join(missing)}")
