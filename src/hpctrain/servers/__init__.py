"""Servers on a compute node for one user alone."""
