"""Image classification on MNIST or digits: one data file, one model file, and a trainer for each framework."""
