"""The trainer, which builds a run from all other packages; a training step; the training loop.

Decisions, with their reasons:

- Sums of micro batches are scaled by the tokens of the global batch, because masks are unequal. The engine
  divides by the data-parallel size alone.
- The trainer states the accumulation boundary: the batch may grow between steps.
- A pass overwrites what a layer observed, so that a recomputed block counts once.
- A run is resolved once (`resolved.py`), before the ranks start: all work from the same values.
"""
