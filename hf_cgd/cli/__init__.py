"""What recipes and commands share."""
