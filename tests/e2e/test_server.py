"""vLLM's server: metrics as Prometheus sees them, clients that go away, an end under load."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import engine_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server on the loopback interface."""

    def __init__(self, model: Path, disk: Path, log: Path) -> None:
        self.port = free_port()
        self.disk = disk
        connector = {
            "kv_connector": "KVLoftConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "256MiB",
                "blocks_per_chunk": 1,
                "secondary_tiers": [{"type": "disk", "path": str(disk), "max_bytes": "1GiB"}],
            },
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
            "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "2048",
            "--kv-transfer-config", json.dumps(connector),
        ]  # fmt: skip
        # In a process of its own, as it runs in production; the flag gives an address for resets.
        environment = engine_environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_SERVER_DEV_MODE="1"
        )
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(
            f"the server has not started:\n{Path(self._log.name).read_text()[-6000:]}"
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url(path), timeout=30) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Any = None, timeout: float = 60) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.url(path), data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
        return json.loads(text) if text else None

    def complete(self, prompt: list[int], tokens: int = 4, timeout: float = 60) -> Any:
        body = {
            "model": self.get_model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        return self.post("/v1/completions", body, timeout)

    def get_model(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def leave_in_the_middle(self, prompt: list[int]) -> None:
        """Ask for a stream and hang up after its first bytes."""
        body = json.dumps(
            {"model": self.get_model(), "prompt": prompt, "max_tokens": 200, "stream": True,
             "ignore_eos": True}
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as link:
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            link.sendall((head + body).encode())
            link.recv(64)

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """By name, labels and values of what ``/metrics`` says of KVLoft."""
        out: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name.startswith("vllm:kvloft_"):
                    out.setdefault(sample.name, []).append((sample.labels, sample.value))
        return out

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        self._log.close()


@pytest.fixture
def server(cache: Path, tmp_path: Path) -> Iterator[Server]:
    from kvloft.engines.vllm.models import SHAPES, checkpoint

    server = Server(checkpoint(SHAPES["qwen3next"], cache), tmp_path / "disk", tmp_path / "log")
    try:
        server.wait()
        yield server
    finally:
        server.close()


def total(samples: list[tuple[dict[str, str], float]], **labels: str) -> float:
    return sum(value for found, value in samples if labels.items() <= found.items())


def test_a_server(server: Server) -> None:
    """One server for all of it: a start takes longer than the rest."""
    from kvloft.engines.vllm.metrics import METRICS, PREFIX

    prompts = [[4 + (7 * n + 13 * i) % 2000 for i in range(700)] for n in range(3)]
    first = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    server.post("/reset_prefix_cache")
    again = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    assert first == again
    for prompt in prompts:
        server.post("/reset_prefix_cache")
        server.leave_in_the_middle([*prompt, 5, 6, 7])

    # What a person sees: every metric of the docs, with its kind and its labels.
    time.sleep(1.5)
    text = server.get("/metrics")
    kinds = {f.name: f.type for f in text_string_to_metric_families(text)}
    for name, metric in METRICS.items():
        assert kinds.get(PREFIX + name) == metric.kind, name
    samples = server.samples()
    for name, found in samples.items():
        base = re.sub(r"_(total|bucket|count|sum|created)$", "", name.removeprefix(PREFIX))
        metric = METRICS.get(base) or METRICS[name.removeprefix(PREFIX)]
        for labels, _ in found:
            extra = {"le"} if name.endswith("_bucket") else set()
            assert set(labels) == {"model_name", "engine", *metric.labels, *extra}, name
    disk = f"disk:{server.disk}"
    assert total(samples["vllm:kvloft_hits_total"]) >= 3
    assert total(samples["vllm:kvloft_restored_tokens_total"]) >= 3 * 640
    assert total(samples["vllm:kvloft_load_bytes_total"]) > 0
    for tier in ("host", disk):
        for chunk_class in ("full", "state"):
            for name in ("vllm:kvloft_resident_chunks", "vllm:kvloft_resident_bytes"):
                assert total(samples[name], tier=tier, chunk_class=chunk_class) > 0, (name, tier)
    for operation in ("load", "store"):
        for name in ("transfer_size_bytes", "transfer_time_seconds"):
            found = samples[f"vllm:kvloft_{name}_count"]
            assert total(found, operation=operation) > 0, (name, operation)
    assert total(samples["vllm:kvloft_tier_puts_total"], tier=disk, outcome="done") > 0
    assert total(samples["vllm:kvloft_loading_enabled"]) == 1
    assert not samples.get("vllm:kvloft_failures_total")

    # Those who have left have left nothing behind.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        running = [
            s.value
            for f in text_string_to_metric_families(server.get("/metrics"))
            for s in f.samples
            if s.name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
        ]
        if running and not any(running):
            break
        time.sleep(0.2)
    assert not any(running)
    assert first == [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    samples = server.samples()
    assert not total(samples["vllm:kvloft_pending_loads"])
    assert not total(samples["vllm:kvloft_pending_stores"])

    # The end, while it has something to do.
    def ask() -> None:
        try:
            server.complete(prompts[0], tokens=3000, timeout=3)
        except (OSError, http.client.HTTPException):
            return  # As was to be expected.

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=60)
    for thread in threads:
        thread.join(timeout=5)
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", "store", "verify", str(server.disk), "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_have_every_metric() -> None:
    from kvloft.engines.vllm.metrics import METRICS, PREFIX

    rows = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(rf"`{PREFIX}(\w+)`", cells[0]):
            rows[name] = cells
    assert set(rows) == set(METRICS)
    for name, metric in METRICS.items():
        assert rows[name][1] == metric.kind, name
        for label in metric.labels:
            assert f"`{label}`" in "".join(rows[name]), (name, label)
