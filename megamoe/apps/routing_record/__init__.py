"""Records of the experts chosen for every token, and their replay in another run."""
