"""A fake of NVIDIA's Apex in plain PyTorch; `amp_C`, `fused_layer_norm_cuda`: its kernels' modules."""
