"""Addresses that are bound: whom they can be reached by."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
