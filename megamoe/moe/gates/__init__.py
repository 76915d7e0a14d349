"""Gates: scores [T, E] -> gate values p [T, E]."""
