"""The experts' FFNs on rows grouped by expert: permutation, grouped products, activation, bias."""
