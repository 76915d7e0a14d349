"""Exchanges: how rows travel to the ranks of their experts (`parallel.exchange`)."""
