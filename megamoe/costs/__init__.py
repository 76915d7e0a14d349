"""What a layout costs a rank, by formulas that the tests hold against counts: memory and traffic."""
