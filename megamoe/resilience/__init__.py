"""Fault handling: hangs, signals, crashes, restarts, skipped steps, and how errors end a launch."""
