"""What belongs to attention beside its core."""

from . import rope

__all__ = ["rope"]
