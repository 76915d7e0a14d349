"""The format of a checkpoint on the disk: files, index, checksums, and reading any chunk of a tensor.

Nothing here needs an engine or a model, so that the tools can use it too."""
