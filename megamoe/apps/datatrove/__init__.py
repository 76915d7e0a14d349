"""Pipelines of datatrove that end in our datasets: its readers, filters, deduplication and executors."""
