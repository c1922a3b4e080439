"""The weight gradient of each group, one rule for each kind of layer."""
