"""What is common to the frameworks: recipes."""

from . import recipe

__all__ = ["recipe"]
