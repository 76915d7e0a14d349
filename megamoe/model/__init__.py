"""The transformer: the only room that knows Megatron-Core, Transformer Engine and Apex."""
