"""Applications around the core that pretrains: before a run, beside it, and after it. The core never
imports them.
"""
