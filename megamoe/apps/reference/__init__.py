"""The list of all parts."""
