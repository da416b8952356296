"""What Optuna suggests, and which trials it ends."""

from dataclasses import replace

from hpctrain.commands.sweep import file, search
from tests.commands.sweep.helpers import SWEEP, trial


def test_suggestions_are_in_range_and_the_same_again():
    first = [search.suggest(SWEEP, [], number) for number in range(12)]
    assert first == [search.suggest(SWEEP, [], number) for number in range(12)]
    assert len({parameters["lr"] for parameters in first}) == 12
    assert all(1e-3 <= parameters["lr"] <= 0.1 and parameters["seed"] in (1, 2, 3) for parameters in first)
    assert {parameters["on-nan"] for parameters in first} == {"stop", "skip"}


def test_suggestions_follow_the_results_and_keep_away_from_what_runs():
    finished = [trial(number, -abs(number - 3), 1e-3 * 1.3**number) for number in range(16)]  # best at 2.2e-3
    rates = [search.suggest(SWEEP, finished, number)["lr"] for number in range(16, 24)]
    blind = [search.suggest(SWEEP, [], number)["lr"] for number in range(16, 24)]
    assert max(rates) < max(blind) and sorted(rates)[4] < 4e-3
    running = [*finished, *(trial(16 + number, None, 1.9e-3) for number in range(12))]
    assert [search.suggest(SWEEP, running, n) for n in range(30, 40)] != [
        search.suggest(SWEEP, finished, n) for n in range(30, 40)
    ]
    others = [trial(16, state="diverged"), trial(17, state="pruned", scores=[-9])]
    search.suggest(SWEEP, [*finished, *others], 18)


def test_the_median_pruner():
    """After five complete trials, and by the best score so far, in both directions."""
    complete = [trial(number, 0.9, scores=[0.1 * number, 0.5 + 0.1 * number, 0.9]) for number in range(5)]
    for scores, hopeless in [
        ([0.19], True),
        ([0.2], False),
        ([0.3, 0.69], True),
        ([0.71, 0.1], False),
        ([0.1, 0.2, 0.9], False),
    ]:
        assert search.should_prune(SWEEP, complete, trial(9, scores=scores)) == hopeless, scores
    assert not search.should_prune(SWEEP, complete[1:], trial(9, scores=[0.0]))
    poor = [
        trial(number, state=state, scores=[0.0, 0.0, 0.0])
        for number, state in ((5, "running"), (6, "pruned"))
    ]
    assert search.should_prune(SWEEP, [*complete, *poor], trial(9, scores=[0.19]))  # they lower no median
    losses = replace(SWEEP, direction="minimize")
    assert [search.should_prune(losses, complete, trial(9, scores=[loss])) for loss in (0.19, 0.21)] == [
        False,
        True,
    ]


def test_grid_has_each_combination_once():
    grid = file.Sweep(
        ["x"], "m", "minimize", {"a": {"values": [1, 2]}, "b": {"values": ["x", "y"]}}, sampler="grid"
    )
    found = [tuple(search.suggest(grid, [], number).values()) for number in range(5)]
    assert found == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (1, "x")]
    large = file.Sweep(
        ["x"], "m", "minimize", {f"p{i}": {"values": [*range(99)]} for i in range(99)}, sampler="grid"
    )
    assert [search.suggest(large, [], 100)[name] for name in ("p0", "p97", "p98")] == [0, 1, 1]
