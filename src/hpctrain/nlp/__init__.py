"""Fine-tuning of language models: one module per task.

Tasks read published data sets, or the sample data in this package.
"""
