"""Use a fine-tuned model."""
