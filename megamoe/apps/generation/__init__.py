"""Text and translations from a trained model: sampling, beam search, batches, the experts of each token.

Beside transformers' `GenerationMixin`: draws are keyed by seed and prompt, so that a text does not depend on
its batch; all ranks of a layout take part; the experts of each token are recorded.
"""
