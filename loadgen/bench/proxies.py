"""Builds and starts what the relay bench compares: the C mock, eldrd and its peers, each on its core. Measures nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loadgen.bench import frames
from loadgen.ports import free_port

if TYPE_CHECKING:
    from types import TracebackType

ROOT: Final = Path(__file__).resolve().parents[2]
NATIVE: Final = Path(__file__).with_name("native")
PROXY_CORE: Final = 0
OTHER_CORE: Final = 1
DECODE: Final = ("d0", "d1")
PEERS: Final = ("eldrd", "vllm-router", "plain-aiohttp", "byte-relay")
_VLLM_ROUTER: Final = "vllm-router==0.1.17"
_PROGRAMS: Final = {"mock": ("mock.c", "hook.c"), "load": ("load.c",), "relay": ("relay.c",)}
_READY_S: Final = 120.0


class BenchError(RuntimeError):
    """The bench cannot run; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy. requests: whether it speaks HTTP; the byte relay passes on what decode servers take."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    requests: bool

    def cpu_us(self) -> float:
        """CPU time of the process so far, all threads."""
        # The process's CPU-time clock (clock_getcpuclockid(3)); /proc counts in ticks of 10 ms.
        return time.clock_gettime_ns((~self.process.pid << 3) | 2) / 1e3

    def rss_kb(self) -> int:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])


def build(folder: Path, *, peers: bool = True) -> None:
    """Compile the native programs into ``folder`` and, with ``peers``, install vllm-router there. Raises BenchError."""
    folder.mkdir(parents=True, exist_ok=True)
    for program, sources in _PROGRAMS.items():
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(folder / program)]
        try:
            subprocess.run([*command, *(str(NATIVE / s) for s in sources)], check=True)
        except FileNotFoundError:
            raise BenchError("gcc is missing: install a C compiler") from None
        except subprocess.CalledProcessError:
            raise BenchError(f"{program} does not compile") from None
    home = folder / "vllm-router"
    if peers and not (home / "bin/vllm-router").exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(home / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if subprocess.run([*pip, _VLLM_ROUTER], check=False).returncode:
            raise BenchError(f"{_VLLM_ROUTER} cannot be installed; leave vllm-router out with --proxies")


class Stage:
    """The mock and the proxies in front of it, running inside a ``with`` block. Programs and logs lie in ``folder``.
    blocks, tail: full blocks and further tokens of each prompt, as the mock's hook tells them."""

    def __init__(self, folder: Path, blocks: int = frames.BLOCKS, tail: int = frames.TAIL) -> None:
        self._folder = folder
        self._prompt = blocks, tail
        self._started: list[subprocess.Popen[bytes]] = []
        self._prefill, self._decode, self._hook = free_port(), [free_port() for _ in DECODE], free_port()
        self.mock_port = self._decode[0]

    def __enter__(self) -> Stage:
        if len(os.sched_getaffinity(0)) < 2:
            raise BenchError("two CPU cores are needed: one for the proxy, one for the load")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        prompts = frames.prompts(*self._prompt)
        frames.write_frames(prompts, self._folder / "frames.bin")
        frames.write_partition(prompts, DECODE, self._folder / "partition.safetensors")
        hook = f"{self._folder / 'frames.bin'}:{self._hook}"
        roles = [f"{self._prefill}:p", *(f"{port}:d" for port in self._decode)]
        self._spawn("mock", [str(self._folder / "mock"), "-H", hook, *roles], OTHER_CORE)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str) -> Proxy:
        """Start one of PEERS and wait until it answers. Raises BenchError."""
        port = free_port()
        prefill, *decode = (f"http://127.0.0.1:{p}" for p in (self._prefill, *self._decode))
        python = [sys.executable, "-m"]
        env: dict[str, str] = {}
        if name == "eldrd":
            argv = [*python, "eldrd", "serve", "--config", str(ROOT / "eldrd.toml.example")]
            env = {
                "ELDRD_SERVER_LISTEN": f"127.0.0.1:{port}",
                "ELDRD_PREFILL_WORKERS": json.dumps([{"name": "p0", "url": prefill}]),
                "ELDRD_DECODE_WORKERS": json.dumps(
                    [{"name": n, "url": u} for n, u in zip(DECODE, decode, strict=True)]
                ),
                "ELDRD_DECODE_POLICY": "eldr",
                "ELDRD_PARTITIONS_FILE": str(self._folder / "partition.safetensors"),
                "ELDRD_SIGNATURES_LISTEN": f"tcp://127.0.0.1:{self._hook}",
            }
        elif name == "vllm-router":
            argv = [str(self._folder / "vllm-router/bin/vllm-router"), "--port", str(port), "--vllm-pd-disaggregation"]
            argv += ["--prefill", prefill, *(part for url in decode for part in ("--decode", url))]
            argv += ["--policy", "round_robin", "--log-level", "error", "--worker-startup-check-interval", "1"]
            argv += ["--prometheus-port", str(free_port())]
        elif name == "plain-aiohttp":
            argv = [*python, "loadgen.bench.plain_aiohttp", str(port), prefill, *decode]
        elif name == "byte-relay":
            argv = [str(self._folder / "relay"), str(port), str(self._decode[0])]
        else:
            raise BenchError(f"{name} is none of {', '.join(PEERS)}")
        proxy = Proxy(name, port, self._spawn(name, argv, PROXY_CORE, env), requests=name != "byte-relay")
        self._await(proxy)
        return proxy

    def _spawn(
        self, name: str, argv: list[str], core: int, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["taskset", "-c", str(core), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
            )
        self._started.append(process)
        return process

    def _await(self, proxy: Proxy) -> None:
        body = b'{"model":"mock","prompt":"hi","max_tokens":2}'
        end = time.monotonic() + _READY_S
        while time.monotonic() < end and proxy.process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                if connection.getresponse().status == 200:
                    connection.close()
                    return
            connection.close()
            time.sleep(0.2)
        raise BenchError(f"{proxy.name} does not answer: see {self._folder / proxy.name}.log")
