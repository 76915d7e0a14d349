"""Score functions: scores [T, E] -> gating values p [T, E]."""
