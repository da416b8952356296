"""Natural language: five fine-tunings over one module; data as published, or the samples that ship with the package."""
