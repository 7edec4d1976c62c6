"""Parts of a pod template, one file each. Pure."""
