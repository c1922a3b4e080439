"""Studies of the paper that train small models in loops of their own."""
