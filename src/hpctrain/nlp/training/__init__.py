"""Train any task."""
