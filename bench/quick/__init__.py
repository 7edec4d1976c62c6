"""Has anything become slower? Ratios and counts that are the same on most machines, against those of the repository."""
