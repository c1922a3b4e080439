"""A server on localhost that speaks what huggingface_hub's client asks of the Hub, over real HTTP.

Repositories, uploads of small and large files, commits, downloads, and the check of cards. It can be told to fail.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

USER = "tester"
TOKEN = "hf_a_secret_that_must_not_leave"
LARGE = 60_000
"""Bytes from which a file is a large one (LFS)."""
LICENSES = {"mit", "apache-2.0", "other"}


@dataclass
class Repository:
    """Files by path, and every commit's message with the paths it wrote."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(self.commits).encode()).hexdigest()


@dataclass
class Failure:
    """What to do to the next `times` requests whose method and path match."""

    pattern: str
    times: int
    how: Literal["500", "drop"]


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.failures: list[Failure] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, pattern: str, times: int = 1, how: Literal["500", "drop"] = "500") -> None:
        """Let the next requests fail whose "METHOD path" matches."""
        self.failures.append(Failure(pattern, times, how))

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client has gone: what a dropped connection is.
        pass


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any = None, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        name = f"{self.command} {path}"
        with self.server.lock:
            self.server.requests.append(name)
            self.server.bodies.append(body)
            failure = next((one for one in self.server.failures if one.times and re.search(one.pattern, name)), None)
            if failure is not None:
                failure.times -= 1
        if failure is not None and failure.how == "drop":
            self.close_connection = True
            self.connection.close()
        elif failure is not None:
            self.answer({"error": "Internal Error: out of order"}, 500)
        else:
            self.route(path, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def route(self, path: str, body: bytes) -> None:
        for pattern, method in ROUTES.items():
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match is not None:
                with self.server.lock:
                    getattr(self, method)(body, *match.groups())
                return
        self.not_found("Entry")

    def not_found(self, what: str) -> None:
        self.answer({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

    def who(self, body: bytes) -> None:
        self.answer({"type": "user", "name": USER, "auth": {"accessToken": {"role": "write"}}})

    def create(self, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
            return
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        is_new = name not in self.server.repositories
        self.server.repositories.setdefault(name, Repository())
        content = {"url": f"{self.server.url}/{name}", "id": name, "name": name}
        self.answer(
            content if is_new else content | {"error": "You already created this repo"}, 200 if is_new else 409
        )

    def validate(self, body: bytes) -> None:
        errors = card_errors(json.loads(body)["content"])
        self.answer({"errors": [{"message": one} for one in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, body: bytes, name: str) -> None:
        files = json.loads(body)["files"]
        modes = [
            {"path": one["path"], "uploadMode": "lfs" if one["size"] >= LARGE else "regular", "shouldIgnore": False}
            for one in files
        ]
        self.answer({"files": modes})

    def batch(self, body: bytes, name: str) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            wanted: dict[str, Any] = {"oid": one["oid"], "size": one["size"], "authenticated": True}
            if one["oid"] not in self.server.large:
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}", "header": {}}}
            objects.append(wanted)
        self.answer({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.answer({"error": "other bytes than announced"}, 400)
            return
        self.server.large[oid] = body
        self.answer()

    def commit(self, body: bytes, name: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self.not_found("Repo")
            return
        message, written = "", []
        for line in body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "header":
                message = value["summary"]
            elif part["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
                written.append(value["path"])
            elif part["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.large[value["oid"]]
                written.append(value["path"])
        repository.commits.append((message, written))
        url = f"{self.server.url}/{name}/commit/{repository.sha}"
        self.answer({"success": True, "commitOid": repository.sha, "commitUrl": url})

    def info(self, body: bytes, name: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self.not_found("Repo")
            return
        card = repository.files.get("README.md", b"").decode()
        front = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else {}
        siblings = [{"rfilename": path} for path in repository.files]
        self.answer({"id": name, "sha": repository.sha, "siblings": siblings, "tags": front.get("tags", []),
                     "private": False, "downloads": 0, "likes": 0, "cardData": front})  # fmt: skip

    def tree(self, body: bytes, name: str, folder: str | None) -> None:
        repository = self.server.repositories.get(name)
        start = f"{folder.strip('/')}/" if folder and folder.strip("/") else ""
        found = [] if repository is None else [path for path in repository.files if path.startswith(start)]
        if repository is None or not found:
            self.not_found("Entry" if repository else "Repo")
            return
        files = repository.files
        self.answer([{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in found])

    def resolve(self, body: bytes, name: str, path: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None or path not in repository.files:
            self.answer({"error": "not found"}, 404, X_Error_Code="EntryNotFound" if repository else "RepoNotFound",
                        X_Repo_Commit=repository.sha if repository else "")  # fmt: skip
            return
        content = repository.files[path]
        tag = hashlib.sha256(content).hexdigest()
        self.answer(content, ETag=f'"{tag}"', X_Repo_Commit=repository.sha, Content_Type="application/octet-stream")


ROUTES = {
    r"GET /api/whoami-v2": "who",
    r"POST /api/repos/create": "create",
    r"POST /api/validate-yaml": "validate",
    r"POST /api/models/([^/]+/[^/]+)/preupload/[^/]+": "preupload",
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": "batch",
    r"PUT /lfs/(\w+)": "put",
    r"POST /api/models/([^/]+/[^/]+)/commit/[^/]+": "commit",
    r"GET /api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?": "info",
    r"GET /api/models/([^/]+/[^/]+)/tree/[^/]+(/.*)?": "tree",
    r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/[^/]+/(.+)": "resolve",
}


def card_errors(card: str) -> list[str]:
    """What the Hub says of front matter: YAML without nulls, lists and licences it knows, complete results only."""
    parts = card.split("---\n")
    if len(parts) < 3 or parts[0]:
        return ["no front matter"]
    front = yaml.safe_load(parts[1])
    errors = [f"{path} is null" for path, value in leaves(front) if value is None]
    if front.get("license", "mit") not in LICENSES:
        errors.append('"license" must be one of [' + ", ".join(sorted(LICENSES)) + "]")
    for name in ("tags", "datasets", "metrics"):
        if not all(isinstance(one, str) for one in front.get(name, [])):
            errors.append(f'"{name}" must be a list of strings')
    if "model-index" in front:
        try:
            _, results = model_index_to_eval_results(front["model-index"])
        except (KeyError, TypeError, ValueError) as error:
            errors.append(f"model-index is not complete: {error!r}")
        else:
            errors += [f"{one.metric_type} is no number" for one in results if type(one.metric_value) is not float]
    return errors


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    else:
        yield path, value


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """The server, while the block runs."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def at_this_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubServer]:
    """The server, which huggingface_hub takes for the real one, as it does where HF_ENDPOINT is set."""
    with running_hub() as server:
        constants = huggingface_hub.constants
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        changed: dict[str, Any] = {
            "ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(home / "cache"), "HF_HUB_DISABLE_XET": True,
        }  # fmt: skip
        for name, value in changed.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # The client's waits between its tries, and no one else's.
        impatient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr(huggingface_hub.utils._http, "time", impatient)
        yield server
