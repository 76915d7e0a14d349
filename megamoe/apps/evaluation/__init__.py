"""What becomes of a trained model: it is opened without its optimizer, and evaluated."""
