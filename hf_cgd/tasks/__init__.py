"""What is known about each benchmark, a file apiece: data, groups, splits, metric, published hyperparameters."""
