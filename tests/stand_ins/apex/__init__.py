"""A stand-in for NVIDIA's Apex in plain PyTorch; `amp_C` and `fused_layer_norm_cuda` stand for its kernels."""
