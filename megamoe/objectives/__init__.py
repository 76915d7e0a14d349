"""What a model is trained to predict: how samples become batches of inputs, labels and a loss mask."""
