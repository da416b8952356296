"""Get models, change them, and keep them."""
