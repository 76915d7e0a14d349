"""Tools for clusters: checks of nodes before training, the status of a run, the hostfile of the deepspeed launcher."""
