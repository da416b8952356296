"""docs/site.py, the hook of mkdocs, without mkdocs."""

import importlib.util
import posixpath
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from slurm_cluster import REPOSITORY

from tests.tools.browser import Browser


@pytest.fixture
def hook(monkeypatch):
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mkdocs.structure.files"].File = sys.modules["mkdocs.structure.files"].Files = SimpleNamespace
    monkeypatch.delenv("HPCTRAIN_SOURCE_URL", raising=False)
    spec = importlib.util.spec_from_file_location("site_hook", REPOSITORY / "docs/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page(hook):
    config = hook.on_config(SimpleNamespace(mdx_configs={}, extra_css=[], nav=None))
    (home, *groups) = config.nav
    assert home == {"Home": "index.md"} and [next(iter(group)) for group in groups] == ["Guides", "Reference"]
    listed = ["index.md", *(place for group in groups for places in group.values() for place in places)]
    assert sorted(listed) == sorted(hook.find_pages())


def test_every_link_of_the_site_leads_somewhere(hook):
    """Also pictures. What is no page of the site is text, or leads to the repository."""
    pages, links = hook.find_pages(), 0
    for place, path in pages.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
        text = hook.on_page_markdown(path.read_text(), page, None, None)
        assert not re.search(r"^```bash cluster", text, re.M)
        prose = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", text, flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", prose):
            found = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            shown = found.removeprefix("files/").removesuffix(".md") in hook.find_shown_files()
            assert shown or found in pages or (REPOSITORY / "docs" / found).is_file(), f"{place}: {target}"
            links += 1
    assert links > 100


def test_links_and_lists_of_github(hook, monkeypatch):
    assert hook.slugify("Weights & Biases", "-") == "weights--biases"
    text = "[env](../../launch/site.sh), [home](../../README.md#x)\n- a\n  - b\n"
    there = "docs/guides/a.md", "guides/a.md"
    assert hook.adapt(text, *there) == "env, [home](../index.md#x)\n- a\n    - b\n"
    assert hook.adapt("[site.sh](../../launch/site.sh)", *there) == "launch/site.sh"
    train = "src/hpctrain/vision/train.py"
    assert hook.adapt(f"[loop](../../{train})", *there) == f"[loop](../files/{train}.md)"
    monkeypatch.setenv("HPCTRAIN_SOURCE_URL", "https://example.org/blob/v1")
    assert hook.adapt(text, *there).startswith("[env](https://example.org/blob/v1/launch/site.sh), ")


@pytest.mark.slow
def test_tables_and_long_words_are_no_wider_than_a_telephone(hook, tmp_path):
    word = "x" * 100
    row = "".join(f"<td><code>{word}</code></td>" for _ in range(9))
    (tmp_path / "a.html").write_text(f"<style>{hook.STYLE}</style><table><tr>{row}</table><p><code>{word}")
    with Browser() as browser:
        browser.resize(360, 700)
        browser.open(f"file://{tmp_path}/a.html")
        assert browser.evaluate("document.querySelector('table').scrollWidth > 900")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
