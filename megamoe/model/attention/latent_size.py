"""Parameters and products of multi-head latent attention, from the configuration alone."""

from megamoe.config.model_schema import LatentConfig, ModelConfig


def latent_weights(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the weights of one block's linear layers, each of which a token multiplies with once."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (latent.nope_size + latent.rope_size)
    rank = latent.query_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    down = hidden * (latent.key_value_rank + latent.rope_size)
    up = latent.key_value_rank * heads * (latent.nope_size + latent.value_size)
    return queries + down + up + heads * latent.value_size * hidden


def latent_norms(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the parameters of one block's norms of the compressed queries, keys and values."""
    columns = latent.key_value_rank + (latent.query_rank or 0)
    return columns * (2 if model.norm == "layernorm" else 1)


def latent_scores(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the products of one query with one key, and of its weight with the value, in all heads."""
    return model.num_attention_heads * (latent.nope_size + latent.rope_size + latent.value_size)
