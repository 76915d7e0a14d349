"""Text to tokens on disk, and tokens to batches: everything before the embedding.

Megatron-Core computes sample indices, and our cache stores them (`index_cache.py`): its own writes in
place, unpickles, and leaves ranks in a barrier if rank 0 fails.
"""
