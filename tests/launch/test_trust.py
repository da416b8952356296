"""Questions about the owner of a path: launch/lib/trust.sh has them all."""

import re

from slurm_cluster import REPOSITORY


def test_owners_and_links_are_asked_about_in_one_file():
    """Besides it, each script asks whose its functions are, and site.sh runs in the user's shell."""
    question = re.compile(r"\[ .*-[OL] |\[\[.* -[OL] |stat -\S+ \S*%[uUA]")
    found = {
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for path in (REPOSITORY / "launch").rglob("*.sh")
        if path.name not in ("trust.sh", "site.sh")
        for line in path.read_text().splitlines()
        if question.search(line) and '"$_of" "$_main"' not in line
    }
    assert not found


def test_the_kind_of_a_path_is_no_word_of_a_language():
    """stat translates its %F: with a Korean locale no folder was the user's own."""
    texts = [path.read_text() for path in (REPOSITORY / "launch").rglob("*.sh")]
    assert not [text for text in texts if re.search(r"stat .*%F", text)]
