"""Fine-tuning of language models on published data sets, or on the samples of this package."""
