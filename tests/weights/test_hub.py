"""Models of a hub, simulated by a local server that records requests."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
from quantize import Choice, write
from support.checkpoints import (
    llama_config,
    llama_tensors,
    speaking_checkpoint,
    write_checkpoint,
)
from support.tiny import measure_little

from offload_rt.cli import plan, run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/model"
# What repositories have beside what is read: the same weights again, and what was made of them.
DECOYS = (
    "consolidated.00.safetensors", "original/model.safetensors", "original/consolidated.00.pth",
    "original/tokenizer.model",
    "pytorch_model.bin", "onnx/model.onnx", "model-Q4_K_M.gguf", "model-00001-of-00009.safetensors",
    "README.md",
)  # fmt: skip
SMALL = [
    "--device", "cpu", "--max-model-len", "64", "--quiet", "--prompt", "the", "--max-new-tokens",
    "3",
]  # fmt: skip


@dataclass
class Hub:
    """Repositories of the server, and the sent bytes of each file by path."""

    repositories: dict[str, Path] = field(default_factory=dict)
    n_requests: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    is_down: bool = False

    def forget(self) -> None:
        self.n_requests = 0
        self.sent = {}

    def n_sent_weights(self) -> int:
        weights = (".safetensors", ".bin", ".pth", ".gguf")
        return sum(n for path, n in self.sent.items() if path.endswith(weights))

    def reply(self, path: str, wanted: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path; wanted: its range."""
        self.n_requests += 1
        if self.is_down:
            return 503, {}, b""
        match = re.fullmatch(r"/api/models/(\w+/\w+)(/revision/\w+|/tree/\w+)?", path)
        if match and match[1] in self.repositories:
            root = self.repositories[match[1]]
            files = [(str(f.relative_to(root)), f.stat()) for f in root.rglob("*") if f.is_file()]
            told: Any = [{"type": "file", "path": n, "size": s.st_size, "oid": n} for n, s in files]
            if not (match[2] or "").startswith("/tree"):
                told = {"id": match[1], "sha": COMMIT}
            return 200, {}, json.dumps(told).encode()
        match = re.fullmatch(r"/(\w+/\w+)/resolve/\w+/(.+)", path)
        if not match or match[1] not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        file = self.repositories[match[1]] / match[2]
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes", "ETag": etag}
        if wanted is None:
            return 200, headers, content
        first, last = (int(bound) for bound in wanted.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return 206, headers, part


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(has_body=False)

        def do_GET(self, has_body: bool = True) -> None:
            path = self.path.split("?")[0]
            status, headers, body = hub.reply(path, self.headers.get("Range"))
            if has_body and "/resolve/" in path and status < 300:
                name = path.partition("/resolve/")[2].partition("/")[2]
                hub.sent[name] = hub.sent.get(name, 0) + len(body)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A simulated hub and an empty cache."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (
        ("ENDPOINT", address), ("HUGGINGFACE_CO_URL_TEMPLATE", template),
        ("HF_HUB_CACHE", str(tmp_path / "hub_cache")), ("HF_HUB_OFFLINE", False),
    ):  # fmt: skip
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def sharded(directory: Path, **changes: Any) -> Path:
    """A checkpoint of two shards with a tokenizer, and much else beside it."""
    speaking_checkpoint(directory, n_shards=2, num_hidden_layers=3, **changes)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in DECOYS:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x" * 1000)
    return directory


def test_only_required_files_are_fetched_once(hub, tmp_path, line):
    hub.repositories[NAME] = sharded(tmp_path / "model")
    code, out, _ = line("--model", NAME, *SMALL)
    assert code == 0 and out
    names = (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )  # fmt: skip
    assert hub.sent == {name: (hub.repositories[NAME] / name).stat().st_size for name in names}
    hub.forget()
    assert line("--model", NAME, *SMALL)[:2] == (0, out)
    assert hub.sent == {}
    hub.forget()
    assert line("--model", NAME, *SMALL, "--offline")[:2] == (0, out)
    assert hub.n_requests == 0


@pytest.mark.parametrize(("changes", "told"), [
    ({"model_type": "telepathy", "architectures": None}, "telepathy"),
    ({"clever_trick": True}, "'clever_trick' is not understood"),
    ({"quantization_config": {"quant_method": "magic"}}, "magic"),
])  # fmt: skip
def test_config_is_refused_before_a_weight_download(changes, told, hub, tmp_path, line):
    """Also that of a draft model."""
    hub.repositories[NAME] = sharded(tmp_path / "model")
    hub.repositories["someone/odd"] = sharded(tmp_path / "odd", **changes)
    for flags in (["--model", "someone/odd"], ["--model", NAME, "--draft-model", "someone/odd"]):
        code, out, err = line(*flags, *SMALL)
        assert (code, out) == (2, "") and told in err.splitlines()[-1]
        assert "config.json" in hub.sent and not hub.n_sent_weights()


def test_plan_fetches_configs_only(hub, tmp_path, line, monkeypatch):
    measure_little(monkeypatch)
    monkeypatch.setattr("offload_rt.cli.plan.measure_disk_gbps", lambda folder: 2.5)
    hub.repositories[NAME] = sharded(tmp_path / "model", max_position_embeddings=512)
    code, out, err = line("--model", NAME, "--gpu", "rtx4090", "--ram", "8GB", main=plan.main)
    assert code == 0 and "verdict: " in out
    assert set(hub.sent) == {"config.json"}
    hub.forget()
    flags = ["--model", NAME, "--device", "cpu", "--max-model-len", "300", "--plan", "--json"]
    code, out, err = line(*flags)
    result = json.loads(out)
    assert code == 0 and "planning from configs" in err and not hub.n_sent_weights()
    assert result["links"]["disk"] == 2.5 and result["plan"]["tiers"] == ["device"] * 3
    # Once the weights are here, the plan is that of the run.
    assert line("--model", NAME, *SMALL)[0] == 0
    code, out, err = line(*flags)
    assert "disk: measured with the model's files" in json.loads(out)["sources"]
    assert "planning from configs" not in err


@pytest.mark.parametrize("kind", ["fp8", "gptq", "pack-quantized", "nf4"])
def test_quantised_model_is_planned_by_its_headers(kind, hub, tmp_path, line):
    """Not where weights contain sizes."""
    sizes = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 128}
    config = llama_config(torch_dtype="bfloat16", **sizes)
    source = write_checkpoint(tmp_path / "source", config, llama_tensors(config))
    write(source, tmp_path / "model", Choice(kind))
    hub.repositories[NAME] = tmp_path / "model"
    flags = [
        "--gpu", "rtx4090", "--ram", "8GB", "--context", "16", "--max-new-tokens", "16", "--json",
    ]  # fmt: skip
    code, out, err = line("--model", NAME, *flags, main=plan.main)
    if kind == "nf4":
        assert code == 2 and "download the checkpoint first" in err.splitlines()[-1]
        return
    assert code == 0, err
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert 0 < hub.n_sent_weights() < 200_000 < whole
    local = line("--model", str(tmp_path / "model"), *flags, main=plan.main)[1]
    assert json.loads(out)["plan"] == json.loads(local)["plan"]


def test_missing_models_are_reported_in_one_sentence(hub, tmp_path, line):
    """Offline without a request; a repository without a config; one that does not exist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-Q4_K_M.gguf").write_bytes(b"x" * 1000)
    hub.repositories[NAME] = tmp_path / "model"

    def refused(*flags: str, main: Any = run.main) -> str:
        code, out, err = line("--model", *flags, main=main)
        assert (code, out) == (2, "") and not hub.n_sent_weights()
        return err.splitlines()[-1]

    assert "not in the hub cache" in refused(NAME, "--offline", *SMALL)
    flags = ("--offline", "--gpu", "rtx4090")
    assert "not in the hub cache" in refused(NAME, *flags, main=plan.main)
    assert hub.n_requests == 0
    message = refused(NAME, *SMALL)
    assert "no config.json" in message and "GGUF" in message
    assert "someone/nothing" in refused("someone/nothing", *SMALL)


def test_unreachable_hub_is_reported_and_cached_models_work(hub, tmp_path, line, monkeypatch):
    hub.repositories[NAME] = sharded(tmp_path / "model")
    assert line("--model", NAME, *SMALL)[0] == 0
    hub.is_down = True
    hub.forget()
    assert line("--model", NAME, *SMALL)[0] == 0
    code, out, err = line("--model", "someone/other", *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "could not be fetched from the hub (no connection); check" in err
    (tmp_path / "models" / "demo-target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    err = line("--model", "models/demo-traget", *SMALL)[2]
    assert "(no connection); did you mean models/demo-target?" in err
    assert line("--model", "someone/other", "--gpu", "rtx4090", main=plan.main)[0] == 2
    assert hub.n_requests < 6  # it was not asked again and again
