"""The transformer: the only package that imports Megatron-Core's blocks and Transformer Engine."""
