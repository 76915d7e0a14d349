"""Residuals of further papers."""
