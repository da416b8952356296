"""The run folder: one run's configuration, metrics, checkpoints, result, and what reads them."""
