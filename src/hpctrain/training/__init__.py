"""What trainers share: the order of the data, DDP's buckets, compiled kernels, sharded models."""
