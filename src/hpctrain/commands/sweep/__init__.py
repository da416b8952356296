"""`hpctrain sweep`: the file of a sweep, its trials, and the search over their results."""
