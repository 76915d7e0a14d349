"""Scorers of further papers."""
