"""Text to tokens on disk, and tokens to batches: everything before the embedding.

Megatron-Core computes sample indices, and our cache stores them (`index_cache.py`): its own writes in
place, unpickles, and leaves ranks in a barrier if rank 0 fails.

`data.order: samples` is kept beside `documents`, Megatron-Core's order and the default: it needs no index,
but neighbours in a sample are neighbours in the input, and a source needs a share of at least 2^-20.
"""
