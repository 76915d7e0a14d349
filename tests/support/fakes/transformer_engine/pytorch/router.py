"""Kernels that Megatron-Core imports; this project's router is its own."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
