"""Names on the hub: from a cache made up here, and from a server on this machine that speaks the hub's few words."""

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
model = ch.load(sys.argv[1])
print(model(torch.tensor([[3, 1, 4, 1, 5]])).sum().item())
"""


def load_elsewhere(name, cache, **environment):
    """In a process of its own: the library reads its settings when it is imported."""
    import os

    settings = {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LOAD, name],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def made_up_cache(home, folder):
    """A cache as huggingface_hub lays it out: blobs, a snapshot of links to them, and a reference to the snapshot."""
    place = home / "hub" / "models--org--tiny"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        blob = place / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)


def test_what_is_cached_needs_no_network(llama, tmp_path):
    made_up_cache(tmp_path / "home", llama)
    # Any call over the network would end at a port that nobody listens to.
    ran = load_elsewhere("hf:org/tiny", tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(ch.load(llama)(IDS).sum().item(), rel=1e-12)


class Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        self.asked.append(self.path)
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
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_model_is_fetched_once(llama, tmp_path, server):
    wanted = ch.load(llama)(IDS).sum().item()
    for _ in range(2):
        ran = load_elsewhere("hf:org/tiny", tmp_path / "home", HF_ENDPOINT=server)
        assert ran.returncode == 0, ran.stderr
        assert float(ran.stdout) == pytest.approx(wanted, rel=1e-12)
        first, Hub.asked = Hub.asked, []
    assert first == [], "the second time, everything was in the cache"
    fetched = {path.name for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "modeling_tiny.py"}, "neither code nor pickles"


@pytest.mark.bad_input
def test_a_name_that_is_not_there(tmp_path, server):
    ran = load_elsewhere("hf:org/other", tmp_path / "home", HF_ENDPOINT=server)
    assert ran.returncode == 1
    assert "hf:org/other is not in the hub's cache and cannot be downloaded" in ran.stderr


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["hf:", "hf:tiny", "hf:a/b/c", "hf:../x/y", "hf:a/b@"])
def test_a_name_that_is_none(name):
    with pytest.raises(StorageError, match="is not a name on the hub"):
        ch.load(name)
