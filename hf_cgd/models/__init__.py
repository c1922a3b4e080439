"""What networks take, return and end in."""
