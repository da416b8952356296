"""Commands of hpctrain that do not train: see cli.py."""
