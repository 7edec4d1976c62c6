"""Pods as processes of this machine: what they run, their environment and their volumes."""
