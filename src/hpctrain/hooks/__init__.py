"""What torch and Lightning call in every process, by the entry points in pyproject.toml."""
