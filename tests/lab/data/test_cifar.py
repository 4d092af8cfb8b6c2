"""CIFAR-100: both official layouts, damaged and malicious files, downloads that break off."""

import hashlib
import io
import os
import pickle
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from anyk.lab import data
from anyk.lab.data import cifar
from anyk.lab.errors import LabError


def pack(folder, archive, prefix="cifar-100-python"):
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, f"{prefix}/{path.name}")
    return archive


@pytest.fixture
def python(tmp_path):
    return cifar.write_small(tmp_path / "python", 3, classes=4)


@pytest.fixture
def binary(python, tmp_path):
    """The same in the layout of the binary archive: a coarse label, a fine label and the pixels, a byte each."""
    folder = tmp_path / "binary"
    folder.mkdir()
    for part in ("train", "test"):
        batch = pickle.loads((python / part).read_bytes())
        labels = [np.array(batch[kind], dtype=np.uint8)[:, None] for kind in ("coarse_labels", "fine_labels")]
        (folder / f"{part}.bin").write_bytes(np.concatenate([*labels, batch["data"]], 1).tobytes())
    names = pickle.loads((python / "meta").read_bytes())["fine_label_names"]
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    return folder


def test_the_contract(python):
    dataset = cifar.load(python)
    assert dataset.name == "cifar100"
    assert dataset.kind == "images"
    assert dataset.classes == ("class_00", "class_01", "class_02", "class_03")
    assert dataset.train.parts[0].shape == (12, 3, 32, 32)
    assert dataset.train.parts[0].dtype == torch.uint8
    assert dataset.test.parts[0].shape == (4, 3, 32, 32)
    assert dataset.train.labels.tolist() == [0, 1, 2, 3] * 3
    assert len(dataset.mean) == len(dataset.std) == 3


def test_python_and_binary_hold_the_same(python, binary, cache, tmp_path):
    sources = [
        python,
        binary,
        tmp_path,
        pack(python, tmp_path / "p.tar.gz"),
        pack(binary, tmp_path / "b.tar.gz", "cifar-100-binary"),
    ]
    (tmp_path / "cifar-100-python").symlink_to(python)
    loaded = [cifar.load(source) for source in sources]
    assert len({dataset.fingerprint for dataset in loaded}) == 1
    assert len(list(cache.iterdir())) == 5


def test_channels_come_first(tmp_path):
    pixels = np.arange(3072, dtype=np.uint32).astype(np.uint8)
    folder = cifar.write_small(tmp_path / "c", 1, classes=1)
    (folder / "train").write_bytes(pickle.dumps({b"fine_labels": [0], b"data": pixels[None]}, protocol=4))
    image = cifar.load(folder).train.parts[0][0]
    assert image[1, 2, 3] == pixels[1 * 1024 + 2 * 32 + 3]


def test_files_of_python_2(tmp_path):
    """As the official files were written: protocol 2, byte strings, the old name of numpy's function."""
    folder = cifar.write_small(tmp_path / "c", 1, classes=1)
    pixels = bytes(range(256)) * 12

    def text(content):
        return b"U" + bytes([len(content)]) + content  # SHORT_BINSTRING

    train = (
        b"\x80\x02}(" + text(b"fine_labels") + b"]K\x00a" + text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n"
        b"cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n" + text(b"u1") +
        b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(pixels).to_bytes(4, "little") + pixels + b"tbu."
    )  # fmt: skip
    (folder / "train").write_bytes(train)
    assert cifar.load(folder).train.parts[0].numpy().tobytes() == pixels


def test_a_malicious_pickle_is_not_run(python, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    for content in (Evil(), {b"data": Evil(), b"fine_labels": [0]}):
        for file in ("train", "meta"):
            good = (python / file).read_bytes()
            (python / file).write_bytes(pickle.dumps(content))
            with pytest.raises(LabError, match=rf"{file} in .*posix\.mkdir, which does not belong there and was not run"):
                cifar.load(python)
            (python / file).write_bytes(good)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (b"", "Ran out of input"),
        (pickle.dumps({b"fine_labels": [0]}), "'data'"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.float32), b"fine_labels": [0]}, 4), "not an array of bytes but float32"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [0, 1]}, 4), "2 labels for pixels of shape"),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [4]}, 4),
            "from 4 to 4, but there are 4 classes",
        ),
    ],
)
def test_damaged_or_mislabelled_python_files(python, train, reason):
    (python / "train").write_bytes(train)
    with pytest.raises(LabError, match=rf"train in .*{reason}"):
        cifar.load(python)


def test_damaged_or_mislabelled_binary_files(binary):
    whole = (binary / "train.bin").read_bytes()
    for content, reason in ((whole[:-7], "not whole records"), (b"", "0 labels"), (whole[:1] + b"\x09" + whole[2:], "to 9")):
        (binary / "train.bin").write_bytes(content)
        with pytest.raises(LabError, match=rf"train\.bin in .*{reason}"):
            cifar.load(binary)


def test_what_is_not_cifar(tmp_path, python):
    with pytest.raises(LabError, match=r"nothing\.tar\.gz does not exist"):
        data.load(f"cifar100:{tmp_path}/nothing.tar.gz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match=r"empty is not CIFAR-100: .*holds none of them"):
        cifar.load(tmp_path / "empty")
    (python / "meta").unlink()
    with pytest.raises(LabError, match=r"not CIFAR-100: it should hold train, test, meta .* but holds test, train\."):
        cifar.load(pack(python, tmp_path / "p.tar.gz"))


@pytest.mark.parametrize("damage", ["cut", "sum", "empty", "text"])
def test_damaged_archives(python, tmp_path, damage):
    whole = pack(python, tmp_path / "p.tar.gz").read_bytes()
    wrong_sum = whole[:-8] + bytes(4) + whole[-4:]  # as if a bit of the pixels had changed on the way
    (tmp_path / "p.tar.gz").write_bytes({"cut": whole[:-3000], "sum": wrong_sum, "empty": b"", "text": b"<html>"}[damage])
    with pytest.raises(LabError, match=r"p\.tar\.gz.*download it again"):
        cifar.load(tmp_path / "p.tar.gz")


def test_an_archive_writes_nowhere(python, tmp_path):
    """Members with paths that climb out, and links, are not followed."""
    (tmp_path / "secret").write_bytes(b"secret")
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        for name in ("train", "meta"):
            tar.add(python / name, f"../../{name}")
        link = tarfile.TarInfo("test")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("/evil"), io.BytesIO())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LabError, match=r"holds meta, train\."):
        cifar.load(tmp_path / "p.tar")
    assert sorted(tmp_path.rglob("*")) == before


class Server:
    """An HTTP server on this machine that can break off or fail."""

    def __init__(self, content):
        self.content, self.requests = content, 0
        self.break_after, self.status = len(content), None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests += 1
                if outer.status:
                    return self.send_error(outer.status)
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.content)))
                self.end_headers()
                self.wfile.write(outer.content[: outer.break_after])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/cifar-100-python.tar.gz"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def checksum(self):
        return "md5:" + hashlib.md5(self.content).hexdigest()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = cifar.write_small(tmp_path / "source", 40, classes=4)
    server = Server(pack(folder, tmp_path / "source.tar.gz").read_bytes())
    yield server
    server.close()


def download(server, **changes):
    return cifar.load(None, **({"url": server.url, "checksum": server.checksum} | changes))


def test_downloaded_once(server, cache):
    dataset = download(server)
    assert len(dataset.train) == 160
    assert download(server).fingerprint == dataset.fingerprint
    (next(cache.glob("*.safetensors"))).unlink()  # the archive is there still
    assert download(server).fingerprint == dataset.fingerprint
    assert server.requests == 1


def test_a_broken_connection_leaves_nothing(server, cache):
    server.break_after = 100_000
    with pytest.raises(LabError, match=r"cifar-100-python\.tar\.gz could not be downloaded.*cifar100:PATH"):
        download(server)
    assert not list(cache.glob("cifar*"))
    server.break_after = None
    assert len(download(server).train) == 160


def test_a_wrong_checksum_is_thrown_away(server, cache):
    with pytest.raises(LabError, match=r"cifar-100-python\.tar\.gz arrived with a wrong checksum.*cifar100:PATH"):
        download(server, checksum="md5:" + "0" * 32)
    assert not list(cache.glob("cifar*"))
    assert len(download(server).train) == 160


def test_no_such_file_and_no_network(server):
    server.status = 404
    with pytest.raises(LabError, match=r"could not be downloaded \(404.*by hand"):
        download(server)
    server.close()
    with pytest.raises(LabError, match=r"could not be downloaded \(.*refused.*by hand"):
        download(server)


def test_a_cache_that_is_no_folder(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYK_CACHE", str(tmp_path / "file"))
    with pytest.raises(LabError, match="could not be stored in"):
        download(server)
