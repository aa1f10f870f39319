"""A training as a Slurm job: settings of the cluster, workers over nodes, the script, its submission."""
