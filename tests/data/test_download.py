"""Downloads from a local server that interrupts, changes and corrupts files; the list of data sets."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading

import pytest

from clearhead.data import DATASETS, DatasetFile, DatasetInfo, Download, fetch, fetch_file, get_dataset, identify
from clearhead.errors import ConfigError, DataError, StorageError

CONTENT = bytes(i * 31 % 251 for i in range(200_003))
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves one content; `break_after` cuts the next answers short, `log` keeps the ranges asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.break_after = []
        self.statuses = []
        self.ranges = True
        self.etag = '"one"'
        self.log = []

    def url(self, name="data.bin"):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        requests = self.headers.get("Range")
        server.log.append(requests)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = 0
        unchanged = self.headers.get("If-Range", server.etag) == server.etag
        if requests and server.ranges and unchanged:
            start = int(re.fullmatch(r"bytes=(\d+)-", requests)[1])
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        else:
            self.send_response(200)
        body = server.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", server.etag)
        self.end_headers()
        if server.break_after:
            body = body[: server.break_after.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def _remote(server, **changes):
    fields = {"url": server.url(), "name": "data.bin", "size": len(CONTENT), "sha256": DIGEST} | changes
    return Download(**fields)


def _names(folder):
    return sorted(item.name for item in folder.iterdir())


def test_fetch_file_existing_file_is_not_downloaded_again(server, tmp_path):
    progress_calls = []
    path = fetch_file(
        _remote(server), tmp_path / "new", progress=lambda have, total: progress_calls.append((have, total))
    )
    assert path.read_bytes() == CONTENT
    assert _names(tmp_path / "new") == ["data.bin"]
    assert progress_calls[-1] == (len(CONTENT), len(CONTENT))
    assert [have for have, _ in progress_calls] == sorted(have for have, _ in progress_calls)
    assert fetch_file(_remote(server), tmp_path / "new") == path
    assert server.log == [None]


def test_fetch_file_interrupted_connection_is_resumed(server, tmp_path):
    server.break_after = [70_001, 50_021]
    path = fetch_file(_remote(server), tmp_path, pause=0.0)
    assert path.read_bytes() == CONTENT
    assert server.log == [None, "bytes=70001-", "bytes=120022-"]
    assert _names(tmp_path) == ["data.bin"]


def test_fetch_file_later_call_resumes_partial_file(server, tmp_path):
    server.break_after = [70_001]
    with pytest.raises(StorageError, match=r"after 1 tries; 70,001 bytes are in .*try again to resume"):
        fetch_file(_remote(server), tmp_path, tries=1)
    assert not (tmp_path / "data.bin").exists()
    assert fetch_file(_remote(server), tmp_path).read_bytes() == CONTENT
    assert server.log == [None, "bytes=70001-"]


def test_fetch_file_without_range_support_restarts(server, tmp_path):
    server.ranges = False
    server.break_after = [70_001]
    assert fetch_file(_remote(server), tmp_path, pause=0.0).read_bytes() == CONTENT


def test_fetch_file_changed_file_restarts(server, tmp_path):
    server.content = b"old" * 30_011
    server.break_after = [40_009]
    with pytest.raises(StorageError, match="try again to resume"):
        fetch_file(_remote(server, size=None), tmp_path, tries=1)
    server.content, server.etag = CONTENT, '"two"'
    assert fetch_file(_remote(server, size=None), tmp_path).read_bytes() == CONTENT


def test_fetch_file_too_long_partial_file_restarts(server, tmp_path):
    server.break_after = [70_001]
    with pytest.raises(StorageError):
        fetch_file(_remote(server, size=None), tmp_path, tries=1)
    with (tmp_path / "data.bin.part").open("ab") as part:
        part.write(b"0" * 200_003)
    assert fetch_file(_remote(server, size=None), tmp_path, pause=0.0).read_bytes() == CONTENT


def test_fetch_file_partial_file_of_unknown_origin_restarts(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(b"something else")
    assert fetch_file(_remote(server), tmp_path).read_bytes() == CONTENT
    assert server.log == [None]


def test_fetch_file_with_wrong_checksum_raises_and_leaves_no_file(server, tmp_path):
    with pytest.raises(StorageError, match=f"returned a file with sha256 {DIGEST}, expected 00"):
        fetch_file(_remote(server, sha256="00"), tmp_path)
    assert _names(tmp_path) == []
    with pytest.raises(StorageError, match="bytes, expected 100"):
        fetch_file(_remote(server, size=100), tmp_path)
    assert _names(tmp_path) == []


def test_fetch_file_replaces_invalid_local_file(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1] + b"\x00")
    assert fetch_file(_remote(server), tmp_path).read_bytes() == CONTENT


def test_fetch_file_http_error_raises_storage_error(server, tmp_path):
    server.statuses = [503]
    assert fetch_file(_remote(server), tmp_path, pause=0.0).read_bytes() == CONTENT
    server.statuses = [404]
    with pytest.raises(StorageError, match=r"returned 404 Not Found; the file may have moved"):
        fetch_file(_remote(server, name="other.bin"), tmp_path)
    assert len(server.log) == 3


def test_fetch_file_unreachable_server_raises_storage_error(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    remote = Download(url=f"http://127.0.0.1:{port}/a", name="a")
    with pytest.raises(StorageError, match=r"could not be downloaded .*refused.* after 2 tries; 0 bytes are in"):
        fetch_file(remote, tmp_path, tries=2, pause=0.0)


def test_download_invalid_address_or_name_raises_config_error():
    with pytest.raises(ConfigError, match="expected http:// or https://"):
        Download(url="file:///etc/passwd", name="a")
    with pytest.raises(ConfigError, match="expected a name without folders"):
        Download(url="http://127.0.0.1/a", name="../a")


def _pairs(server, **changes):
    fields = {
        "name": "pairs",
        "task": "translation",
        "description": "d",
        "license": "l",
        "origin": "o",
        "remotes": (Download(url=server.url("pairs.tsv"), name="pairs.tsv"),),
    }
    return DatasetInfo(**(fields | changes))


def test_fetch_without_checksum_checks_the_structure(server, tmp_path):
    item = _pairs(server)
    assert item.verified == "structure only (unknown checksum)"
    server.content = b"Go.\tVe.\n"
    assert [path.read_bytes() for path in fetch(item, tmp_path)] == [b"Go.\tVe.\n"]
    (tmp_path / "pairs.tsv").unlink()
    server.content = b"<html>moved</html>"
    with pytest.raises(StorageError, match=r"the download of pairs is invalid .*renamed to .*pairs\.tsv\.bad"):
        fetch(item, tmp_path, tries=1)
    assert _names(tmp_path) == ["pairs.tsv.bad"]


def test_fetch_by_name_and_without_downloads(tmp_path):
    with pytest.raises(ConfigError, match="no data set is called 'nope'; known: en-es, svhn"):
        fetch("nope", tmp_path)
    with pytest.raises(DataError, match=r"sklearn-digits cannot be downloaded; .*inside scikit-learn"):
        fetch("sklearn-digits", tmp_path)


def test_identify_recognizes_files_by_content(server, tmp_path):
    path = tmp_path / "whatever"
    path.write_bytes(CONTENT)
    copy = DatasetFile(name="data.bin", size=len(CONTENT), sha256=DIGEST)
    dataset = [_pairs(server), _pairs(server, name="mine", copies=(copy,))]
    assert identify(path, dataset) == (dataset[1], "data.bin")
    path.write_bytes(b"other")
    assert identify(path, dataset) is None
    assert identify(path) is None


def test_datasets_have_complete_descriptions():
    assert len({item.name for item in DATASETS}) == len(DATASETS)
    for item in DATASETS:
        assert get_dataset(item.name) is item
        assert item.task in {"translation", "text", "digits", "sort-dedup", "speech"}
        assert item.description
        assert item.license
        assert item.origin
        for file in (*item.remotes, *item.copies):
            assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.sha256 is None or file.size
    assert get_dataset("svhn").size == 182_040_794 + 64_275_384
    assert get_dataset("svhn").verified == "sha256"
    assert get_dataset("en-es").size is None
    assert get_dataset("sort-dedup").verified == "nothing to download"
