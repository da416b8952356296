"""The names in launch/lib/environment.sh that a user's variable may have, too.

`pytest tests/launch/test_own_names.py --write-table` writes them.
"""

import re
import textwrap

from slurm_cluster import REPOSITORY

LIBRARY = REPOSITORY / "launch/lib"
FILE = LIBRARY / "environment.sh"
LIST = re.compile(r"OWN_NAMES='[^']*'")
NOT_OURS = {"IFS", "REPLY", "OWN_NAMES", "VARIABLE", "KEY", "FLAVOR", "MPI"}  # the last four are in messages
PROGRAMS = {"new_site.sh", "collect.sh"}  # which start no ranks
PREFIXES = ("APPTAINER_", "HPCTRAIN_", "SLURM_", "PBS_")


def own_names() -> list[str]:
    """The names in capitals that the functions assign and never export."""
    text = "".join(path.read_text() for path in LIBRARY.rglob("*.sh") if path.name not in PROGRAMS)
    text = re.sub(r"^ *#.*$", "", text, flags=re.M)
    assigned = set(re.findall(r"(?:^|(?<=[ ;(]))([A-Z][A-Z_]*)\+?=", text, re.M))
    assigned |= set(re.findall(r"mapfile -t ([A-Z_]+)", text))
    words = {word for line in re.findall(r"\bexport (.*)", text) for word in line.split()}
    exported = {found[1] for word in words if (found := re.match(r"([A-Z][A-Z_]*)(=|$)", word))}
    return sorted(name for name in assigned - exported - NOT_OURS if not name.startswith(PREFIXES))


def test_the_list_of_the_scripts_own_variables_is_complete(request):
    indents = {"initial_indent": "OWN_NAMES='", "subsequent_indent": "    "}
    names = textwrap.fill(" ".join(own_names()) + "'", 110, **indents)
    if request.config.getoption("--write-table"):
        FILE.write_text(LIST.sub(names, FILE.read_text()))
    assert names in FILE.read_text(), "--write-table writes it"
