"""Checkpoints: when they are saved, how they are verified, and a file per rank for sharded models."""
