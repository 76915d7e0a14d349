"""Pipeline parallelism: the order of the passes, and what the stages send each other."""
