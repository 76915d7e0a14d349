"""Fine-tuning on tasks: a task file, its examples, a run of each seed, predictions, metrics, a table."""
