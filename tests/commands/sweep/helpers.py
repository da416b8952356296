"""A sweep file, and trials of it."""

from hpctrain.commands.sweep import file, trials

FILE = """
command: train_single --data DATA --epochs 1 --batch-size 32
metric: test_accuracy
direction: maximize
trials: TRIALS
parameters:
  lr: {low: 1e-3, high: 0.1, log: true}
  seed: {low: 1, high: 3}
  on-nan: {values: [stop, skip]}
"""
PARAMETERS = {"lr": {"low": 1e-3, "high": 0.1, "log": True}, "seed": {"low": 1, "high": 3}}
PARAMETERS |= {"on-nan": {"values": ["stop", "skip"]}}
SWEEP = file.Sweep(["train_single"], "test_accuracy", "maximize", PARAMETERS, trials=40)


def write(folder, text=FILE, trials=4):
    path = folder / "search.yaml"
    data = folder / "data"
    path.write_text(text.replace("DATA", str(data)).replace("TRIALS", str(trials)))
    return path


def trial(number, value=None, lr=0.01, state="running", scores=()):
    parameters = {"lr": lr, "seed": 1, "on-nan": "stop"}
    state = state if value is None else "complete"
    return trials.Trial(number, parameters, state, value, dict(enumerate(scores, start=1)))
