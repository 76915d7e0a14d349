"""Parts of `benchmarks/roofline.py`: models, figures, the page."""
