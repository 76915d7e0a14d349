"""The ranks: launch, layout and its rules, process groups, consensus, tensor-parallel gradient sums.

Decisions, with their reasons:

- Ranks compare settings over the rendezvous' store (`rank_consistency.py`) before a process group exists:
  with other settings a rank might never join.
- The experts' layout does not depend on tensor parallelism (`groups.py`), so that no token is computed
  twice. DeepSpeed's own groups stay within a tensor rank, so ours have its names.
- Scores are gathered over tensor-parallel ranks, hidden states are not: capacity, expert choice and losses
  see the whole micro batch, and authors of parts need not know.
- Hooks sum the gradients of norms, routers and shared experts over tensor-parallel ranks
  (`gradient_sync.py`): after the backward pass DeepSpeed has them in buckets.
- DeepSpeed partitions Muon's state, and Muon exchanges its matrices, because only the orthogonalisation
  needs whole ones. The plan is made of the chunks of checkpoints (`chunks.py`).
- There is one random state to save: tensor-parallel dropout is seeded from it (`model/build.py`).
"""
