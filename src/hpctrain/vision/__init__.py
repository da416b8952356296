"""Image classification: MNIST or digits, one data file and one model file, a trainer for each framework."""
