"""What commands read and change in a cluster."""
