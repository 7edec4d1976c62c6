"""The sections of `spec`, one file each."""
