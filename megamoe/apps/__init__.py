"""Applications around the core that pretrains: before a run, beside it, and with what it leaves. The core never
imports them.
"""
