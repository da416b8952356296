"""The test cluster of hpctrain, for ReFrame: an example of a system with Slurm."""

site_configuration = {
    "systems": [
        {
            "name": "hpctrain-cluster",
            "descr": "cluster/ of hpctrain",
            "hostnames": ["login"],
            "partitions": [
                {
                    "name": "compute",
                    "scheduler": "squeue",  # slurm, where there is accounting (sacct)
                    "launcher": "local",
                    "environs": ["builtin"],
                    "max_jobs": 1,
                    "resources": [{"name": "gpu", "options": ["--gpus-per-node={num_gpus_per_node}"]}],
                }
            ],
        }
    ]
}
