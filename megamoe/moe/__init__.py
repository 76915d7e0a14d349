"""The science: routers, losses, dispatch and experts in pure torch. Process groups come in as arguments."""
