"""Runs rendered pods as processes of this machine (docs/architecture.md).

A pod has a loopback address of its own, so ports are as in a cluster; a volume is a folder, whose mount paths are
replaced in arguments and environment; a Service is a TCP forwarder. Nothing outlives the run.
"""
