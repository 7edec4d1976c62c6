"""The simulated engine's scheduler and KV cache: pure, driven by a clock that the caller passes in.

Nothing here reads a clock, sleeps or touches a socket, so a bench can run hours of traffic in virtual time and the
server can run the same code in real time (``mmrouter_sim.runner``).
"""
