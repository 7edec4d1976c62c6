"""The simulated engine's scheduler and KV cache: pure.

Nothing here reads a clock, sleeps or opens a socket. A benchmark can simulate hours of traffic in virtual time, and the
server runs the same code in real time (``mmrouter_sim.rank_runner``).
"""
