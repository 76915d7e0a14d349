"""Score functions of further papers."""
