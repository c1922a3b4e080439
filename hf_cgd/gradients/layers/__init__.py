"""The weight gradient of each group: one rule for each type of layer."""
