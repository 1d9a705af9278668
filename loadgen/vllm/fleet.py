"""Real vLLM servers as child processes: prefill (NIXL and the hook), decode (NIXL), plain. No requests of its own.

The settings are those of a small CPU machine: eager, one engine process a server, NIXL over loopback TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

Role = Literal["prefill", "decode", "plain"]
_HERE = Path(__file__).parent
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class FleetError(RuntimeError):
    """A server did not start or died; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What all servers of a fleet share. dtype float32 gives signatures equal to transformers'; kv_bytes: KV cache."""

    model: Path
    served_name: str = "tiny"
    dtype: str = "float32"
    block_size: int = 32
    max_model_len: int = 4096
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_bytes: int = 256 << 20
    lease_seconds: int = 30
    kv_load_failure_policy: str = "fail"
    threads: int = 1
    extra: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class VllmServer:
    """One server process. ``start`` returns at once; ``wait`` until /health answers; ``stop`` ends it and its children."""

    def __init__(
        self,
        name: str,
        role: Role,
        settings: ServerSettings,
        log_dir: Path,
        *,
        endpoints: Sequence[str] = (),
        kv_events: str = "",
        port: int | None = None,
    ) -> None:
        """endpoints: signature sockets of the daemons; without any the server runs without the hook; kv_events: address
        at which a prefill server publishes its KV cache events."""
        self.name, self.role, self.settings = name, role, settings
        self.endpoints = list(endpoints)
        self.kv_events = kv_events
        self.port = port or free_port()
        self.side_port = free_port()
        self.log_path = log_dir / f"{name}.log"
        self.start_seconds = 0.0
        self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def transfer_config(self) -> dict[str, Any] | None:
        """The server's --kv-transfer-config, None for a plain server."""
        if self.role == "plain":
            return None
        nixl: dict[str, Any] = {
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": self.settings.lease_seconds},
        }
        role = "kv_producer" if self.role == "prefill" else "kv_consumer"
        if self.role == "decode":
            nixl["kv_load_failure_policy"] = self.settings.kv_load_failure_policy
        if self.endpoints:
            from eldrd_hook.__main__ import transfer_config

            return transfer_config("nixl", self.endpoints, role=role, worker=self.name, phase=self.role, options=nixl)
        return {"kv_connector": "NixlConnector", "kv_role": role, **nixl}

    def command(self) -> list[str]:
        s = self.settings
        flags = {
            "--served-model-name": s.served_name,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": s.dtype,
            "--block-size": s.block_size,
            "--max-model-len": s.max_model_len,
            "--max-num-seqs": s.max_num_seqs,
            "--max-num-batched-tokens": s.max_num_batched_tokens,
            "--kv-cache-memory-bytes": s.kv_bytes,
            # One process less for each server; on CPU vLLM turns the plain name "uni" into "mp".
            "--distributed-executor-backend": _UNIPROC,
        }
        config = self.transfer_config()
        if config is not None:
            flags["--kv-transfer-config"] = json.dumps(config)
        if self.kv_events:
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.kv_events}
            flags["--kv-events-config"] = json.dumps(events)
        words = [str(w) for pair in flags.items() for w in pair]
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(s.model)]
        return [*serve, *words, "--enforce-eager", "--enable-prompt-tokens-details", *s.extra]

    def environment(self) -> dict[str, str]:
        path = [str(_HERE / "nixl_progress"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "OMP_NUM_THREADS": str(self.settings.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "PYTHONPATH": os.pathsep.join(path),
            **self.settings.env,
        }

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float = 600.0) -> None:
        """Waits until the server is healthy. Raises FleetError when it dies or takes longer than ``timeout`` seconds."""
        deadline = self._started + timeout
        while not self._healthy():
            if not self.running:
                raise FleetError(f"{self.name} ended while it started\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise FleetError(f"{self.name} was not healthy within {timeout:.0f} s\n{self.log_tail()}")
            time.sleep(0.25)
        self.start_seconds = time.monotonic() - self._started

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:  # noqa: S310 - our own loopback URL
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self, lines: int = 30) -> str:
        with self.log_path.open(errors="replace") as log:
            return "".join(deque(log, lines))

    def rss_bytes(self) -> int:
        """Resident memory of the server's processes now."""
        return sum(int(fields[21]) for _, fields in self._stats()) * os.sysconf("SC_PAGE_SIZE")

    def pids(self) -> list[int]:
        """The server's processes now."""
        return [pid for pid, _ in self._stats()]

    def _stats(self) -> list[tuple[int, list[str]]]:
        """The /proc/PID/stat fields after the name of every process of the session that ``start`` opened."""
        found: list[tuple[int, list[str]]] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                fields = stat.read_text().rpartition(")")[2].split()
                if self._process is not None and int(fields[3]) == self._process.pid:
                    found.append((int(stat.parent.name), fields))
        return found

    def kill(self) -> None:
        """Ends the server and its children the hard way, as a crash would."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self, timeout: float = 15.0) -> None:
        """SIGTERM, then SIGKILL for what is left of its process group."""
        if self._process is None:
            return
        if self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class VllmFleet:
    """Prefill and decode servers of one model, and a plain one to compare with; a context manager.

    Servers start one after another: their start is bound by the CPU, and a parallel one takes longer on few cores.
    """

    def __init__(
        self,
        settings: ServerSettings,
        log_dir: Path,
        *,
        endpoints: Sequence[str],
        prefill: int = 1,
        decode: int = 2,
        plain: bool = False,
    ) -> None:
        """endpoints: signature sockets of the daemons; log_dir: one log a server."""
        self.prefill = [
            # vLLM binds ipc addresses; the abstract ones leave no file behind.
            VllmServer(
                f"p{i}", "prefill", settings, log_dir, endpoints=endpoints, kv_events=f"ipc://@eldrd-kv-{free_port()}"
            )
            for i in range(prefill)
        ]
        self.decode = [VllmServer(f"d{i}", "decode", settings, log_dir, endpoints=endpoints) for i in range(decode)]
        self.plain = VllmServer("plain", "plain", settings, log_dir) if plain else None

    @property
    def servers(self) -> list[VllmServer]:
        return [*self.prefill, *self.decode, *filter(None, [self.plain])]

    def start(self, timeout: float = 600.0) -> None:
        """Starts all servers, two at a time, and waits until they are healthy; stops them all when one fails."""
        try:
            servers = self.servers
            for at in range(0, len(servers), 2):
                for server in servers[at : at + 2]:
                    server.start()
                for server in servers[at : at + 2]:
                    server.wait(timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
