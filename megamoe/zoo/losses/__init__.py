"""Losses of further papers."""
