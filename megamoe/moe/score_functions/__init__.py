"""Score functions: scores [T, E] -> probabilities p [T, E]."""
