"""`hpctrain check`: compare ranks, inspect nodes and GPUs, find NCCL's network."""
