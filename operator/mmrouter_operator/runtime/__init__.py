"""The running operator: process wiring and the reconcile loop."""
