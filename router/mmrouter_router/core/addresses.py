"""Addresses as text."""


def address(ip: str, port: int) -> str:
    """Return an address as URLs and headers have it: an IPv6 one stands in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
