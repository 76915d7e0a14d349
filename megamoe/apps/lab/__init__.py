"""Studies: rows of configurations over seeds, what is measured, and claims that the numbers decide."""
