"""From a dataset's columns to the group ids of a batch."""
