"""A container for tests: answers HTTP with what it is and was given, or does what its first argument says."""

import json
import os
import pathlib
import signal
import socket
import sys
import time


def answer(host: str, port: int) -> None:
    listener = socket.create_server((host, port))
    print(f"listening on {host}:{port}", flush=True)
    me = {"pid": os.getpid(), "argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            broken = pathlib.Path(os.environ.get("BROKEN_FILE", "/nonexistent")).exists()
            body = json.dumps(me).encode()
            status = "503 Service Unavailable" if broken else "200 OK"
            head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)


match sys.argv[1:]:
    case ["sleep"]:
        time.sleep(600)
    case ["answer-once", host, port]:
        with socket.create_server((host, int(port))) as listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        sys.exit(1)
    case ["fail", code, *words]:
        print(f"{os.getpid()}:", *words, flush=True)
        sys.exit(int(code))
    case ["raise", how]:
        print(f"[12:00] ERROR a.BadError: no adapter in {os.getpid()}")
        print("See https://example.invalid/leaks", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1)
    case ["fail-once-more", path]:
        # Another last line at each start.
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            sys.exit(f"after {file.read()}")
    case ["exit", code]:
        sys.exit(int(code))
    case ["write", path, text]:
        pathlib.Path(path).write_text(text)
    case ["check-then-sleep", path]:
        sys.exit(0 if pathlib.Path(path).exists() and time.sleep(600) is None else 3)
    case ["read-once-there", path]:
        while not pathlib.Path(path).exists():
            time.sleep(0.05)
        print(pathlib.Path(path).read_text(), flush=True)
        time.sleep(600)
    case ["children"]:
        # One child stays in the group, one leaves it: both must end with the container.
        for leave in (False, True):
            if os.fork() == 0:
                if leave:
                    os.setsid()
                time.sleep(600)
        time.sleep(600)
    case ["shared-memory"]:
        import mmap

        name = f"/dev/shm/psm_mmrouter_test_{os.getpid()}"
        with open(name, "w+b") as file:
            file.truncate(4096)
            kept = mmap.mmap(file.fileno(), 4096)
        print(name, flush=True)
        time.sleep(600)
    case ["stubborn"]:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stubborn", flush=True)
        time.sleep(600)
    case ["say", *words]:
        for word in words:
            print(word, flush=True)
        sys.stderr.write("x" * 200_000)
        time.sleep(600)
    case [host, port, *_]:
        answer(host, int(port))
