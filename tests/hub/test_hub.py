"""Models on the hub: from a prepared cache, and from a local server that implements the hub's API."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import clearhead as ch
from clearhead.errors import StorageError

pytest.importorskip("huggingface_hub", reason="huggingface_hub, which keeps the cache, is not installed")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
IDS = torch.tensor([[3, 1, 4, 1, 5]])

LOAD = """
import sys, torch
import clearhead as ch
model = ch.load(sys.argv[1], dtype=None)
print(model(torch.tensor([[3, 1, 4, 1, 5]])).sum().item())
"""


def load_in_subprocess(name, cache, **environment):
    """Load a model in a separate process, because huggingface_hub reads its settings when it is imported."""
    import os

    settings = {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LOAD, name],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def write_cache(home, folder):
    """Write a cache in the layout of huggingface_hub: blobs, a snapshot of links to them, and a reference to it."""
    repository = home / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)


def test_load_cached_model_needs_no_network(llama, tmp_path):
    write_cache(tmp_path / "home", llama)
    # Network access would fail, because no process listens on this port.
    ran = load_in_subprocess("hf:org/tiny", tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(ch.load(llama, dtype=None)(IDS).sum().item(), rel=1e-12)
    ran = load_in_subprocess("org/tiny", tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.returncode == 0, ran.stderr


class Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}
    paths: list[str] = []

    def do_HEAD(self):
        self.respond(with_body=False)

    def do_GET(self):
        self.respond(with_body=True)

    def respond(self, *, with_body):
        self.paths.append(self.path)
        body, headers = b"", {}
        if self.path.startswith("/api/models/org/tiny/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith("/api/models/org/tiny/tree/"):
            body = json.dumps(
                [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()]
            ).encode()
        elif self.path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            body = self.files[self.path.rsplit("/", 1)[1]]
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(llama):
    Hub.files = {file.name: file.read_bytes() for file in llama.iterdir()}
    Hub.files |= {"pytorch_model.bin": b"a pickle", "modeling_tiny.py": b"raise SystemExit(3)"}
    Hub.paths = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_load_downloads_a_model_once(llama, tmp_path, server):
    expected = ch.load(llama, dtype=None)(IDS).sum().item()
    for _ in range(2):
        ran = load_in_subprocess("hf:org/tiny", tmp_path / "home", HF_ENDPOINT=server)
        assert ran.returncode == 0, ran.stderr
        assert float(ran.stdout) == pytest.approx(expected, rel=1e-12)
        first, Hub.paths = Hub.paths, []
    assert first == [], "the second call must use the cache"
    names = {path.name for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert "model.safetensors" in names
    assert not names & {"pytorch_model.bin", "modeling_tiny.py"}, "neither code nor pickles"


@pytest.mark.bad_input
def test_load_model_missing_on_hub_raises(tmp_path, server):
    ran = load_in_subprocess("hf:org/other", tmp_path / "home", HF_ENDPOINT=server)
    assert ran.returncode == 1
    assert "hf:org/other is not in the hub's cache and cannot be downloaded" in ran.stderr


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["gpt2", "hf:gpt2"])
def test_well_known_name_without_organization_suggests_the_full_name(name):
    with pytest.raises(StorageError, match=r"did you mean hf:openai-community/gpt2\?"):
        ch.load(name)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["hf:", "hf:tiny", "hf:a/b/c", "hf:../x/y", "hf:a/b@"])
def test_load_invalid_hub_name_raises(name):
    with pytest.raises(StorageError, match="is not a name on the hub"):
        ch.load(name)
