"""Training objectives of further papers."""
