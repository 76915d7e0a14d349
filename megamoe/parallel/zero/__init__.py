"""DeepSpeed's ZeRO: its configuration, partitioning, offload and optimisers."""
