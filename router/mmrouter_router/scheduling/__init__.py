"""The choice of an engine: candidates, scores, bookings."""
