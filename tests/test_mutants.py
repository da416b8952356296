"""Each mistake that `make mutants` makes still applies to the sources."""

import ast

from tests.tools.mutants import REPOSITORY, read_mutants

MUTANTS = read_mutants()


def test_each_mistake_applies_to_one_place_and_has_tests():
    assert len(MUTANTS) >= 60 and len({*MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (REPOSITORY / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old}"
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text, f"{mutant.file}: {mutant.old}"
        if mutant.file.endswith(".py"):
            ast.parse(changed)  # a mistake that no test needs to notice
        missing = [path for path in mutant.tests if not (REPOSITORY / "tests" / path).exists()]
        assert not missing and mutant.tests, mutant.file
