"""The training objective of conversations."""
