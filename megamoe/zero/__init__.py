"""DeepSpeed's ZeRO: its file, what it cuts and moves off the device, the optimisers under it."""
