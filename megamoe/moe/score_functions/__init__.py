"""Gates: scores [T, E] -> gating values p [T, E]."""
