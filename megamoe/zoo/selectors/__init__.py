"""Selectors of further papers."""
