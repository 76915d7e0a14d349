"""Trained models in EleutherAI's lm-evaluation-harness: a model class, and tasks of local files."""
