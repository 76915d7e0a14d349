"""The transformer: the only package that imports Megatron-Core's blocks and Transformer Engine.

Decisions, with their reasons:

- Multi-token prediction is a module beside the decoder (`heads/multi_token_prediction.py`; DeepSeek-V3,
  section 2.2). Its MoE layers are layers of the model. Text is generated without it.
- An encoder's output layer computes the chosen places only: the other logits are most of a small model's
  FLOPs.
- Norms are never fused with the next linear layer, and the grouped product is an argument of the experts
  (`moe/experts/grouped.py`): names, ZeRO and checkpoints are the same under every backend.
- Megatron-Core's router, dispatchers and experts are not used: they need CUDA streams and buffers.
"""
