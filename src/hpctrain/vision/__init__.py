"""Image classification: data, models, what all trainers share, and a module for each trainer."""
