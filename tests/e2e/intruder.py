"""Runs in a pod that belongs to no deployment: tries everything that only its components may do, and prints the
results.

It reads one JSON object: ``engine`` and ``frontend`` are addresses, ``sidecar_key`` is the sidecars' public CURVE key,
the most that an outsider may know. It prints one: attempt -> outcome.
"""

import http.client
import json
import socket
import sys
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmrouter_lib import feed

SECONDS = 20
FEED = 7557
"""The port of what sidecars publish; the next one is for questions."""
QUESTIONS: dict[str, feed.Request] = {
    "ask what an engine holds": feed.SnapshotRequest(1),
    "forge a verdict": feed.CanaryResult(1, feed.CanaryReport(0, "False", "template", "made up", 1, "intruder")),
}
ENDS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)
CHAT = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})


def connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), SECONDS).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def ask(host: str, port: int, method: str, path: str, body: str = "", **headers: str) -> list[object]:
    connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, {"content-type": "application/json", **sent})
    answer = connection.getresponse()
    return [answer.status, answer.read(4096).decode()]


def speak(host: str, port: int, kind: int, key: str, messages: list[bytes]) -> str:
    """Speak to a socket of the feed, with a key pair of our own where ``key`` names the server's; say how it ends."""
    client = zmq.Context.instance().socket(kind)
    client.linger = 0
    if key:
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = key.encode()
    if kind == zmq.SUB:
        client.subscribe(b"")
    monitor = client.get_monitor_socket(ENDS | zmq.Event.HANDSHAKE_SUCCEEDED)
    client.connect(f"tcp://{host}:{port}")
    if messages and kind == zmq.DEALER:
        with suppress(zmq.Again):  # a connection that was refused already has no pipe left
            client.send_multipart(messages, zmq.NOBLOCK)
    try:
        if not monitor.poll(SECONDS * 1000):
            return "nothing happened"
        if recv_monitor_message(monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            return "let in"
        return "it answered" if client.poll(0) else "refused"
    finally:
        client.disable_monitor()
        client.close()


def attempts(engine: str, frontend: str, sidecar_key: str) -> dict[str, object]:
    wrong = {"authorization": "Bearer wrong"}
    found: dict[str, object] = {}
    for who, key in (("no key", ""), ("a key of its own", sidecar_key)):
        found[f"read the feed with {who}"] = speak(engine, FEED, zmq.SUB, key, [])
        for what, question in QUESTIONS.items():
            found[f"{what} with {who}"] = speak(engine, FEED + 1, zmq.DEALER, key, [b"", feed.encode(question)])
    for port in (5557, 5657, 8002):
        found[f"connect to {port} of the engine's pod"] = connect(engine, port)
    for who, key in (("no key", {}), ("a wrong key", wrong)):
        found[f"call the engine with {who}"] = ask(engine, 8000, "POST", "/v1/chat/completions", CHAT, **key)
        found[f"list the engine's models with {who}"] = ask(engine, 8000, "GET", "/v1/models", **key)
        found[f"call the frontend with {who}"] = ask(frontend, 8000, "POST", "/v1/chat/completions", CHAT, **key)
        found[f"list the frontend's models with {who}"] = ask(frontend, 8000, "GET", "/v1/models", **key)
        for path in ("/control/state", "/control/stream", "/control/decisions"):
            found[f"read {path} with {who}"] = ask(frontend, 8001, "GET", path, **key)
        found[f"explain with {who}"] = ask(frontend, 8001, "POST", "/control/explain", CHAT, **key)
    return found


if __name__ == "__main__":
    print(json.dumps(attempts(**json.load(sys.stdin))))
