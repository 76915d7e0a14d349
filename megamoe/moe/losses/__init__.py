"""Auxiliary losses: small functions of a Routing, each with a weight, any set at once."""
