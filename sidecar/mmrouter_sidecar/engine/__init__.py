"""The engine side of the sidecar: event sockets, probes, encoder proxy."""
