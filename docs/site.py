"""A hook of mkdocs: the pages of the repository, as GitHub shows them, become a site.

The README is its home, and docs/README.md its navigation. A link to a file that is no page leads to the
repository at HPCTRAIN_SOURCE_URL, and without that is text.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
# Pages outside of docs/, by their place in the site.
OTHERS = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "test-cluster.md": "cluster/README.md",
}
# On a telephone the theme lets a table or a long word make the whole page wider than the screen.
STYLE = """
table { display: block; overflow-x: auto; }
p, li, h1, h2, h3 { overflow-wrap: anywhere; }
td { min-width: 7rem; }
"""


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"slugify": slugify, "permalink": True}
    index = (REPOSITORY / "docs/README.md").read_text(encoding="utf-8")
    config.extra_css.append("narrow.css")
    config.nav = [{"Home": "index.md"}]
    for title, text in re.findall(r"^## (\w+).*\n((?:(?!## ).*\n)*)", index, re.M):
        pages = re.findall(r"\]\(([^)#]*\.md)\)", text)
        config.nav.append({title: [find_in_site(posixpath.normpath(f"docs/{page}")) for page in pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for place, source in OTHERS.items():
        content = (REPOSITORY / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=content))
    files.append(File.generated(config, "narrow.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    source = OTHERS.get(place, f"docs/{place}")
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(
        # mkdocs knows no second word, such as that of "bash cluster"
        re.sub(r"^(```\w*).*", r"\1", part) if part.startswith("```") else adapt(part, source, place)
        for part in parts
    )


def slugify(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", separator)


def find_in_site(path: str) -> str | None:
    """Where the site has a file of the repository; None if it has not."""
    for place, source in OTHERS.items():
        if path == source:
            return place
    if path == "docs/README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def adapt(text: str, source: str, place: str) -> str:
    """The links and lists of a page, from GitHub's to those of the site."""
    folder, here = posixpath.dirname(source), posixpath.dirname(place) or "."

    def replace(match: re.Match[str]) -> str:
        shown, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target)) if target else source
        if found := find_in_site(path):
            return f"[{shown}]({posixpath.relpath(found, here)}{anchor})"
        if url := os.environ.get("HPCTRAIN_SOURCE_URL"):
            return f"[{shown}]({url}/{path}{anchor})"
        return path if shown == posixpath.basename(path) else shown

    text = re.sub(r"\[([^\[\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)", replace, text)
    # Python-Markdown needs four spaces before a list in a list, where GitHub takes two.
    return re.sub(r"^ {2,3}(?=- )", "    ", text, flags=re.M)
