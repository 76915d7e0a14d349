"""Models of several widths trained side by side: the coordinate check of muP, and the transfer of a rate."""
