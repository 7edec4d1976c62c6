"""What every engine adapter shares."""
