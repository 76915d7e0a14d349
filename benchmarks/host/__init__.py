"""The parts of `benchmarks/host_time.py`."""
