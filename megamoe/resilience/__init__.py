"""Faults: hangs, signals, crashes, restarts, steps that must not be applied; how a launch ends."""
