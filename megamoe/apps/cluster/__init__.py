"""Tools for clusters: checks of nodes before training, and a run's status."""
