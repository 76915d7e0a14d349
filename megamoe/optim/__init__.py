"""Optimizers, parameter groups, clipping, and schedules of the learning rate and the batch size.

Which optimizer steps, and who reduces and clips the gradients:

| ZeRO | precision | optimizer | reduced by | clipped by |
|---|---|---|---|---|
| 0 | fp32 | `Stage0AdamW`; `Stage0Muon` | DeepSpeed's engine | itself |
| 0 | bf16 | `MasterWeightAdamW`, `MasterWeightMuon` | DeepSpeed's engine | itself |
| 1 | bf16 on CUDA, `tensor` 1 | `AdamW`, `ShortMoments`, `PartitionedMuon` | `ScatteredGradients` | itself |
| 1, 2, 3 | any other | `AdamW`, `ShortMoments` or `PartitionedMuon` | DeepSpeed | DeepSpeed |
| 1, 2, 3, offload on CUDA | any | DeepSpeed's `DeepSpeedCPUAdam` | DeepSpeed | DeepSpeed |

An update on CUDA is one Triton kernel for each tensor, or PyTorch's fused operators (`kernels.adamw.AdamW`).
`ScatteredGradients` reduces during the backward pass with `overlap_comm`. ZeRO 0 has optimizers of ours,
because DeepSpeed there averages norms over ranks with other experts, keeps no fp32 masters, and sums in bf16.
"""
