"""How the ranks of a run share a model: one file per strategy."""
