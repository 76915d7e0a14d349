"""Generated reference: the keys of the configuration and the parts."""
