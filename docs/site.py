"""A hook of mkdocs: the pages of the repository, as GitHub shows them, become a site.

The README is its home, and docs/README.md its navigation. A file that a page links to, such as an example,
is a page of the site, too. A link to anything else leads to the repository at HPCTRAIN_SOURCE_URL, and
without that is text.
"""

import os
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
# Pages outside of docs/, by their place in the site.
OTHERS = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
    "test-cluster.md": "cluster/README.md",
}
# Files that are shown as pages, by the end of their names, with the language of their colors.
SHOWN = {".py": "python", ".sh": "bash", ".env": "bash", ".yaml": "yaml", ".def": "text", ".txt": "text"}
LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
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
    for path in sorted(find_shown_files()):
        code = (REPOSITORY / path).read_text(encoding="utf-8")
        content = f"# {path}\n\n````{SHOWN[posixpath.splitext(path)[1]]}\n{code}````\n"
        files.append(File.generated(config, f"files/{path}.md", content=content))
    return files


def find_pages() -> dict[str, Path]:
    """The Markdown of each page of the site, by its place."""
    docs = REPOSITORY / "docs"
    pages = {str(path.relative_to(docs)): path for path in docs.rglob("*.md") if path != docs / "README.md"}
    return pages | {place: REPOSITORY / source for place, source in OTHERS.items()}


@cache
def find_shown_files() -> set[str]:
    """The files of the repository to which pages link and that are shown as pages."""
    found = set()
    for path in find_pages().values():
        folder = posixpath.dirname(str(path.relative_to(REPOSITORY)))
        for _, target, _ in LINK.findall(path.read_text(encoding="utf-8")):
            file = posixpath.normpath(posixpath.join(folder, target))
            if posixpath.splitext(file)[1] in SHOWN and (REPOSITORY / file).is_file():
                found.add(file)
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    if place.startswith("files/"):
        return markdown
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
    if path in find_shown_files():
        return f"files/{path}.md"
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

    text = LINK.sub(replace, text)
    # Python-Markdown needs four spaces before a list in a list, where GitHub takes two.
    return re.sub(r"^ {2,3}(?=- )", "    ", text, flags=re.M)
