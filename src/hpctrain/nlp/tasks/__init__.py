"""One module per fine-tuning task, and what several of them need."""
