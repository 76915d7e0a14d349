"""The ranks: launch, layout and its rules, process groups, consensus, tensor-parallel gradient sums."""
