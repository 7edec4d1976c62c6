"""A local hub of models that speaks the API of huggingface.co: repositories, revisions, trees, files.

python3 hub_server.py FOLDER REPOSITORY PORT    # in a pod, from its text alone: standard library only
"""

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT, OLDER = "a" * 40, "b" * 40
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """One repository at two commits; `main` is the newer one, in which alone `merges.txt` ends with an `a`."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], repository: str = "org/model", host: str = "127.0.0.1", port: int = 0):
        super().__init__((host, port), _Handler)
        self.files, self.repository = dict(files), repository
        self.private = False
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        # One write per line, so that the lines of concurrent requests do not mix.
        print(f"{self.command} {path}\n", end="", flush=True)
        api, resolve = f"/api/models/{self.server.repository}", f"/{self.server.repository}/resolve/"
        if self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._error(401, "GatedRepo")
        elif path.startswith(api):
            self._api(path.removeprefix(api).strip("/").split("/"))
        elif path.startswith(resolve):
            self._file(*path.removeprefix(resolve).split("/", 1))
        else:
            self._error(404, "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _api(self, parts: list[str]) -> None:
        revision = parts[1] if len(parts) > 1 else "main"
        commit = {"main": COMMIT, COMMIT: COMMIT, OLDER: OLDER}.get(revision)
        files = self.server.files
        if commit is None:
            self._error(404, "RevisionNotFound")
        elif parts[0] == "tree":
            sums = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            self._json([{"type": "file", "path": n, "size": len(files[n]), "oid": sums[n]} for n in files])
        else:
            siblings = [{"rfilename": name} for name in files]
            model = {"id": self.server.repository, "modelId": self.server.repository, "sha": commit, "private": False}
            self._json({**model, "siblings": siblings})

    def _file(self, commit: str, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        commit = {"main": COMMIT}.get(commit, commit)
        data += commit[:1].encode() if name == "merges.txt" else b""
        self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, body: Any) -> None:
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


if __name__ == "__main__":
    folder, served, port = sys.argv[1:]
    content = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    Hub(content, served, "", int(port)).serve_forever()
