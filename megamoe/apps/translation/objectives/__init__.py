"""The training objective of pairs of texts."""
