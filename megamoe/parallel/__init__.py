"""Ranks: the only room that knows DeepSpeed. Launch, groups, engine, optimiser, checkpoints."""
