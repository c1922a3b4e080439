"""The ways to take the groups' gradients."""
