"""Trained models in EleutherAI's lm-evaluation-harness: a model class, and tasks of local files.

Beside the harness' `HFLM`: ours opens a checkpoint of any layout, divides requests over ranks, and says what
the capacity does to the score.
"""
