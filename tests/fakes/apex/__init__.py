"""A stand-in for NVIDIA's Apex in plain PyTorch; `amp_C`, `fused_layer_norm_cuda`: for its kernels."""
