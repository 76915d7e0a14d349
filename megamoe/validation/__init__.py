"""Checks of a run between the sections of its configuration, before anything is allocated."""
