"""Models by their Hub name: from a cache without network, and every error."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils._paths import filter_repo_objects

from baton.engine.models.json_fields import read_json_object
from baton.errors import CheckpointError
from baton.model_hub import IGNORED, check_file, model_folder, other_form, pinned
from baton.tokenizer import load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[2]


def snapshot(home: Path, repo: str = "org/tiny", revision: str = "main") -> Path:
    """Make a model in the cache, in huggingface_hub's layout."""
    stored = home / "hub" / f"models--{repo.replace('/', '--')}"
    folder = stored / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in (ROOT / "models/demo").iterdir():
        (folder / file.name).symlink_to(file)
    (stored / "refs").mkdir()
    (stored / "refs" / revision).write_text(COMMIT)
    return folder


def offline(home: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with this cache and no network, in a process because huggingface_hub reads its settings at import."""
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", f"import sys\nfrom baton.model_hub import *\n{code}"]
    return subprocess.run(command, env=env, text=True, capture_output=True, cwd=ROOT, check=False)


def test_from_the_cache_without_network(tmp_path):
    folder = snapshot(tmp_path)
    code = f"""
for name in ("hf:org/tiny", "hf:org/tiny@main", "hf:org/tiny@{COMMIT}"):
    print(model_folder(name), pinned(name, model_folder(name, weights=False)))
from baton.tokenizer import load_tokenizer
print(load_tokenizer("hf:org/tiny").vocab_size, "torch" in sys.modules)
try:
    model_folder("hf:org/tiny@v2")
except CheckpointError as error:
    print(error)
"""
    done = offline(tmp_path, code)
    size = load_tokenizer(ROOT / "models/demo").vocab_size
    *found, refused = done.stdout.splitlines()
    assert found == [f"{folder} hf:org/tiny@{COMMIT}"] * 3 + [f"{size} False"], done.stderr
    for part in ("model.path: hf:org/tiny@v2: not in the cache", str(tmp_path), "HF_HUB_OFFLINE is set: unset it"):
        assert part in refused


@pytest.mark.slow
def test_pull_prints_the_folder_and_refuses_others(tmp_path):
    folder = snapshot(tmp_path)
    code = """
from baton.cli.main import main
for model in ("hf:org/tiny", "hf:org/other", "models/demo"):
    sys.argv = ["baton", "pull", model]
    try:
        main()
        print(0)
    except SystemExit as ended:
        print(ended.code or 0)
"""
    done = offline(tmp_path, code)
    assert done.stdout.splitlines() == [str(folder), "0", "3", "3"], done.stderr
    first, second = done.stderr.splitlines()
    assert "not in the cache" in first
    assert "must be a Hub name such as hf:" in second


def answered(kind: type[Exception]) -> Exception:
    """Return an error without its constructor, which needs a response of an HTTP client."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (answered(errors.GatedRepoError), ["gated: accept its conditions at", "org/tiny", "set HF_TOKEN"]),
        (answered(errors.RepositoryNotFoundError), ["no such model", "private", "correct the name, or set HF_TOKEN"]),
        (answered(errors.RevisionNotFoundError), ["no revision 'v2'", "branch, tag or commit"]),
        (
            errors.LocalEntryNotFoundError("Got: ConnectError: refused\nAn error happened"),
            ["not in the cache", "cannot be reached", "ConnectError: refused", "set model.path to a folder"],
        ),
        (OSError(28, "No space left on device"), ["cannot be downloaded", "No space left"]),
    ],
)
def test_errors_of_the_hub_are_translated_to_one_line(error, says, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    with pytest.raises(CheckpointError) as caught:
        model_folder("hf:org/tiny@v2")
    message = str(caught.value)
    assert message.startswith("model.path: hf:org/tiny@v2: ")
    assert [part for part in says if part not in message] == []
    assert "\n" not in message


def test_what_is_asked_for(monkeypatch, tmp_path):
    """A worker downloads weights and a router does not. No pickled file is fetched, and no file twice."""
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("hf:org/tiny@v2") == model_folder("hf:org/tiny", weights=False) == tmp_path
    ((repo,), worker), (_, router) = download.call_args_list
    assert (repo, worker["revision"], router["revision"]) == ("org/tiny", "v2", None)
    names = ["config.json", "tekken.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    names += ["merges.txt", "tokenizer.model", "model-00001-of-00002.safetensors"]
    others = ["pytorch_model.bin", "model.pt", "consolidated.safetensors", "onnx/config.json", "README.md", "m.gguf"]
    others += ["adapter/a.json", "awq/model.safetensors", "additional_chat_templates/x/y.jinja"]

    def passes(options):
        return list(filter_repo_objects(names + others, **options))

    keys = ("allow_patterns", "ignore_patterns")
    assert passes({key: worker[key] for key in keys}) == names
    assert passes({key: router[key] for key in keys}) == names[:-1]
    assert worker["ignore_patterns"] == list(IGNORED)


@pytest.fixture
def hub():
    """A server that answers huggingface_hub 2.4 as the Hub does, with `files` of one model. It lists the downloads."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/org/tiny/tree"):
                self.reply(
                    json.dumps(
                        [{"type": "file", "path": name, "size": len(data), "oid": ""} for name, data in files.items()]
                    ).encode()
                )
            elif path.startswith("/api/models/org/tiny"):
                self.reply(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
            elif (name := path.rpartition("/")[2]) in files:
                if self.command == "GET":
                    downloads.append(name)
                self.reply(files[name])
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def reply(self, data: bytes) -> None:
            self.send_response(200)
            headers = {"Content-Length": len(data), "ETag": hashlib.sha1(data).hexdigest(), "X-Repo-Commit": COMMIT}
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    files, downloads = {file.name: file.read_bytes() for file in (ROOT / "models/demo").iterdir()}, list[str]()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", files, downloads
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (None, None, None),
        ({"architectures": ["NoSuchForCausalLM"]}, None, "so its weights are not downloaded: .*'NoSuchForCausalLM'"),
        (None, "model.bin", "model.bin: is a pickle"),
        (None, "model.gguf", "only GGUF files: set model.path to hf:org/tiny:KIND, .* such as model.gguf"),
    ],
)
def test_only_a_model_that_can_be_served_is_downloaded(hub, tmp_path, config, name, words):
    at, files, downloads = hub
    if config is not None:
        files["config.json"] = json.dumps(config).encode()
    if name is not None:
        files[name] = files.pop("model.safetensors")
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": at, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "baton", "pull", "hf:org/tiny"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, cwd=tmp_path, check=False)
    if words is None:
        assert done.returncode == 0, done.stderr
        assert (set(downloads), downloads[-1]) == (set(files), "model.safetensors")
        assert "100%" in done.stderr, "a progress bar"
        return
    assert done.returncode == 3
    assert re.search(words, done.stderr), done.stderr
    assert set(downloads) <= set(files) - {"model.safetensors", "model.bin", "model.gguf"}


@pytest.mark.slow
def test_one_gguf_file_of_a_model_is_downloaded(hub, tmp_path, monkeypatch):
    """A kind selects the file. The result has the commit in its name, and an error names an absent kind."""
    from tests.support.gguf_files import Export

    at, files, downloads = hub
    files.clear()
    for kind in ("F16", "Q8_0"):
        Export(ROOT / "models/demo", tmp_path / f"tiny-{kind}.gguf", "llama", kind)
        files[f"tiny-{kind}.gguf"] = (tmp_path / f"tiny-{kind}.gguf").read_bytes()
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": at, "BATON_HOME": str(tmp_path / "home")}
    for kind, words in (("q8_0", ""), ("Q4_K_M", "hf:org/tiny:Q4_K_M: no GGUF file of this kind")):
        command = [sys.executable, "-m", "baton", "pull", f"hf:org/tiny:{kind}"]
        done = subprocess.run(command, env=env, text=True, capture_output=True, cwd=tmp_path, check=False)
        assert (done.returncode == 0) == (not words), done.stderr
        assert words in done.stderr
        if not words:
            assert pinned("hf:org/tiny:q8_0", Path(done.stdout.strip())) == f"hf:org/tiny@{COMMIT}:q8_0"
    assert set(downloads) == {"tiny-Q8_0.gguf"}


@pytest.mark.parametrize(
    ("names", "result"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-a-Q8_0.gguf"], "a-Q8_0.gguf"),
        (["a.q8_0-00002-of-00002.gguf", "a.q8_0-00001-of-00002.gguf"], "a.q8_0-00001-of-00002.gguf"),
        (
            ["b-Q8_0-00001-of-00002.gguf", "b-Q8_0-00002-of-00002.gguf", "a-Q8_0.gguf"],
            "a-Q8_0.gguf, b-Q8_0-00001-of-00002",
        ),
        (["a-Q4_0.gguf"], "no GGUF file of this kind"),
    ],
)
def test_a_kind_must_be_that_of_one_model(names, result, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(return_value=str(tmp_path)))
    monkeypatch.setattr("baton.model_hub.gguf_folder", lambda path: path)
    for name in names:
        (tmp_path / name).touch()
    if result in names:
        assert model_folder("hf:org/tiny:Q8_0") == tmp_path / result
        return
    with pytest.raises(CheckpointError, match=f"model.path: hf:org/tiny:Q8_0: .*{result}"):
        model_folder("hf:org/tiny:Q8_0")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], ""),
        (["config.json"], ""),
        (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], "this is an adapter, not a model"),
        (["adapter_config.json", "model.safetensors"], ""),
        (
            ["README.md", "b.gguf", "a.gguf"],
            "only GGUF files: set model.path to one of them",
        ),
        (["config.json", "pytorch_model.bin", "model.pth"], "model.pth: is a pickle, which can run code"),
    ],
)
def test_other_forms_are_told_for_what_they_are(names, words):
    assert other_form(names).startswith(words)
    assert bool(other_form(names)) == bool(words)


def test_a_pointer_is_not_the_file(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="this is an adapter"):
        load_tokenizer(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    for reads in (lambda: check_file(file), lambda: load_tokenizer(tmp_path), lambda: read_json_object(file)):
        with pytest.raises(CheckpointError, match=r"tokenizer.json: is a git-lfs pointer, .* git lfs pull"):
            reads()


def test_folders_are_themselves_and_other_names_are_refused(tmp_path):
    assert model_folder(tmp_path) == tmp_path
    assert pinned(str(tmp_path), tmp_path) == str(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(CheckpointError, match=r"model\.pt is a file: must be a folder .*, or a GGUF file"):
        model_folder(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.path: hf:tiny must be hf:org/name"):
        model_folder("hf:tiny")
