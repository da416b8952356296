"""Read data sets of any published format."""
