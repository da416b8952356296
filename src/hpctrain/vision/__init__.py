"""Image classification on digits, MNIST, class folders and tar files: data, models, and a trainer for each framework."""
