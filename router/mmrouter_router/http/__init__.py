"""HTTP transport: client connections, their limits and timeouts, and the client of the engines."""
