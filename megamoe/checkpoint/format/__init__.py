"""A checkpoint on the disk: its files, what they say, whether they are whole, any box of a tensor.

No engine, no model: the tools read it alike."""
