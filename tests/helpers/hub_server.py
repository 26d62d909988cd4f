"""A local stand-in for the Hugging Face Hub: the calls that `huggingface_hub.snapshot_download` makes."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator

TOKEN = "hf_token_of_the_tests"


class Hub:
    """Repositories by `org/name`, each a list of `(revision names, folder)`, and what was asked for.

    A commit's hash is made from its folder's path. Repositories in `gated` give their files, and those in `private`
    give anything, only for `TOKEN`.
    """

    def __init__(self):
        self.repositories: dict[str, list[tuple[str, pathlib.Path]]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.downloaded: list[str] = []  # paths of files that were sent
        self.num_requests = 0
        self.url = ""

    def add(self, name: str, folder, revision: str = "main") -> str:
        """Publishes a folder; returns its commit hash."""
        self.repositories.setdefault(name, []).append((revision, pathlib.Path(folder)))
        return commit_hash(folder)

    def find(self, name: str, revision: str) -> pathlib.Path | None:
        commits = self.repositories.get(name, ())
        return next((folder for known, folder in commits if revision in (known, commit_hash(folder))), None)


def commit_hash(folder) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serves a hub at `hub.url` while the block runs."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.num_requests += 1
            parts = [urllib.parse.unquote(part) for part in urllib.parse.urlparse(self.path).path.strip("/").split("/")]
            if parts[:2] == ["api", "models"]:
                name, (kind, revision) = "/".join(parts[2:4]), parts[4:6]
            else:
                name, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
            has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            folder = hub.find(name, revision)
            if name not in hub.repositories or (name in hub.private and not has_token):
                self._fail(401, "RepoNotFound")
            elif folder is None:
                self._fail(404, "RevisionNotFound")
            elif kind == "revision":
                siblings = [{"rfilename": str(file.relative_to(folder))} for file in files_of(folder)]
                self._send_json({"id": name, "modelId": name, "sha": commit_hash(folder), "siblings": siblings})
            elif kind == "tree":
                self._send_json([_entry(file, folder) for file in files_of(folder)])
            elif name in hub.gated and not has_token:
                self._fail(403, "GatedRepo")
            else:
                self._send_file(folder, "/".join(parts[4:]))

        def _send_file(self, folder: pathlib.Path, name: str) -> None:
            if not (folder / name).is_file():
                self._fail(404, "EntryNotFound")
                return
            content = (folder / name).read_bytes()
            if self.command == "GET":
                hub.downloaded.append(name)
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit_hash(folder)})

        def _send_json(self, value) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _fail(self, status: int, code: str) -> None:
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _entry(file: pathlib.Path, folder: pathlib.Path) -> dict:
    oid = hashlib.sha1(file.read_bytes()).hexdigest()
    return {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": oid}
