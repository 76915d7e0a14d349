"""Masks of further papers."""
