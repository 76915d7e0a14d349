"""Training objectives of labelled examples: classification, regression, tagging, spans."""
