"""A quick check for regressions: ratios and counts that are equal on most machines, against a committed baseline."""
