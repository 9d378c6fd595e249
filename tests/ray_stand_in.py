#!/usr/bin/env python3
"""The commands of Ray that a job's script calls, over TCP: for tests of the script, on machines without Ray.

A head counts the GPUs of the nodes that are connected to it and have its token. The outputs of the
real commands, as of Ray 2.60, are the source of its own.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    """Run one command; the exit status."""
    if sys.argv[1] == "--version":
        sys.stdout.write(f"ray, version {os.environ.get('STAND_IN_VERSION', '2.60.0')}\n")
        return 0
    if "--ray-client-server-port=1" in sys.argv:
        sys.stderr.write("ValueError: Ray Client requires pip package `ray[client]`.\n")
        return 1
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_bytes().strip()
    assert len(token) == 44
    if sys.argv[1] == "status":
        total = ask(os.environ["RAY_ADDRESS"], token, 0)
        sys.stdout.write(f"Total Usage:\n 0.0/2.0 CPU\n 0.0/{total}.0 GPU\n")
        return 0
    parser = argparse.ArgumentParser()
    for name in ("port", "num-gpus"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("node-ip-address", "address", "temp-dir"):
        parser.add_argument(f"--{name}")
    options, _ = parser.parse_known_args(sys.argv[2:])
    assert Path(options.temp_dir).stat().st_mode & 0o077 == 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gpus = int(os.environ.get("STAND_IN_GPUS", options.num_gpus))
    if options.port:
        serve(options.node_ip_address, options.port, token, options.num_gpus)
    ask(options.address, token, gpus)
    return 1


def ask(address: str, token: bytes, gpus: int) -> str:
    """Join with so many GPUs, until the head ends; with none, the number of the head's."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"%s %d\n" % (token, gpus))
        with connection.makefile() as answers:
            total = answers.readline().strip()
            if gpus:
                answers.readline()
            return total


def serve(host: str, port: int, token: bytes, own: int) -> None:
    nodes: dict[object, int] = {"head": own}

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile() as lines:
            given, _, gpus = lines.readline().strip().partition(" ")
            if given.encode() != token:
                return
            nodes[connection] = int(gpus)
            connection.sendall(b"%d\n" % sum(nodes.values()))
            lines.readline()
            del nodes[connection]

    def accept(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    listener = socket.create_server((host, port))
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
