"""What a routed row goes through: experts as grouped products or stacks of them, shared experts, dropout."""
