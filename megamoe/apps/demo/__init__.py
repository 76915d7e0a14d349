"""The first run on a new machine, from an installed package too."""
