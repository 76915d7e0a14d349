"""Tools for clusters: checks of nodes before training, a run's status, the deepspeed launcher's hostfile."""
