"""Generated reference: the keys of the configuration, the parts, and tables of papers' results."""
