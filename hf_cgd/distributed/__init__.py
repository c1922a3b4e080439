"""Sums over processes."""
