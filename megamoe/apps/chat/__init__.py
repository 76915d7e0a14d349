"""Conversations: their templates, their preparation, and the training objective of a model that answers."""
