"""Addresses of this machine: which one leads where, and who listens at it."""

from __future__ import annotations

import socket
import struct

Address = tuple[str, int]


def listen_at(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A socket that listens at this address and no other. Port 0 takes a free one."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog)


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which that one is reached, and by which it reaches this one. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)
        return str(s.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where the system does not say."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(s, get_address, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def why_unreachable(address: Address, seconds: float) -> str | None:
    """Why nothing there accepts a connection within this time; None if something does."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as err:
        return err.strerror or str(err)
    return None
