"""Studies: rows of configurations over seeds, what is measured of them, and claims that the numbers decide."""
