"""Routers, losses, dispatch and experts in pure PyTorch. Process groups are arguments."""
