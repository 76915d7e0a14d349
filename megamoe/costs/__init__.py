"""Formulas for the memory and traffic of a layout per rank; tests compare them with measured counts."""
