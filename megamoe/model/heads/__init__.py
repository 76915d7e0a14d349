"""What stands on the last hidden states: logits, labels, further predictions, and their losses."""
