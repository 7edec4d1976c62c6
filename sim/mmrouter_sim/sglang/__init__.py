"""A simulated SGLang: its flags, its HTTP side, its metrics; its pages are in ``pages.py``."""
