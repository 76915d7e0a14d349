"""How rows travel to the ranks of their experts and back: `parallel.exchange`."""
