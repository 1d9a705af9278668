"""The life of the process: start, ready, reload (SIGHUP), drain (SIGTERM), stop. Serves no request itself."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import structlog
import uvloop
from sdnotify import SystemdNotifier

from eldrd import __version__, config, files, gauges
from eldrd.api import auth
from eldrd.api.admin import Admin
from eldrd.api.app import App
from eldrd.fleet.health import Prober
from eldrd.fleet.pool import IdleWatch
from eldrd.fleet.table import LoadTable, Pool
from eldrd.fleet.worker import Worker
from eldrd.handoff.admission import Admission
from eldrd.handoff.ledger import OUTCOMES, Ledger
from eldrd.handoff.lifecycle import Lifecycle
from eldrd.handoff.snapshot import Snapshot
from eldrd.partitions import cluster
from eldrd.partitions import source as partition_source
from eldrd.partitions.refitter import Refitter, yield_to_loop
from eldrd.routing import build as routing
from eldrd.routing.steptime import StepTime
from eldrd.signatures import cache as signature_cache
from eldrd.signatures.receiver import SignatureReceiver
from eldrd.signatures.recorder import Recorder
from eldrd.telemetry import logs
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from eldrd.config import Settings
    from eldrd.fleet.worker import Role
    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy
    from eldrd.signatures.receiver import Signature
    from eldrd.telemetry.metrics import Sample

log = structlog.get_logger()

# Keys that the running process cannot change: sockets and the cache's memory.
_FIXED = ("server.listen", "server.backlog", "server.keepalive_s", "signatures.listen", "signatures.cache_bytes")


class Daemon:
    """All of eldrd in one process, on one event loop."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._started_with = settings
        self._notifier = SystemdNotifier()
        self._metrics = Metrics()
        self._table = LoadTable()
        self._ledger = Ledger(lambda outcome: self._metrics.handoffs.labels(outcome).inc())
        self._cache = signature_cache.SignatureCache(settings.signatures.cache_bytes)
        self._receiver = SignatureReceiver(self._cache, self._metrics)
        self._watch = IdleWatch(settings.timeouts.idle_s)
        self._prober = Prober(self._worker_changed)
        self._recorder: Recorder | None = None
        self._options = routing.Options()
        self._refitter = Refitter(lambda: self.current().partition, self._refitted, self._metrics)
        self._workers: dict[tuple[str, str, str], Worker] = {}
        self._snapshot: Snapshot | None = None
        self._reloading = asyncio.Lock()
        self._stop = asyncio.Event()
        self._admin = Admin(self.current, self._table, self._ledger, self._receiver, self._cache)
        self._lifecycle = Lifecycle(
            self._table,
            self._ledger,
            self._receiver,
            self._watch,
            self._metrics,
            self._captured,
            self._refitter.add,
            self.current,
        )
        self._admission = Admission()
        self._app = App(self._lifecycle, self._admission, self._admin, self._metrics, self.current)
        self._live_metrics()

    def current(self) -> Snapshot:
        """What a request that begins now is served with."""
        assert self._snapshot is not None
        return self._snapshot

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises ConfigError or OSError when it cannot start."""
        loop = asyncio.get_running_loop()
        settings = self._started_with
        hangups: set[asyncio.Task[None]] = set()

        def hang_up() -> None:
            task = loop.create_task(self._reload())
            hangups.add(task)
            task.add_done_callback(hangups.discard)

        # A SIGHUP while this starts neither ends it nor is lost: its reload waits.
        await self._reloading.acquire()
        loop.add_signal_handler(signal.SIGHUP, hang_up)
        # One after the other: what is wrong is told at once, not after the compilation.
        await self._apply(settings)
        await asyncio.to_thread(_compile)
        if settings.signatures.listen:
            self._receiver.start(settings.signatures.listen)
        web = self._app.server()
        address = config.Address(settings.server.listen)
        listener = await loop.create_server(web, address.host, address.port, backlog=settings.server.backlog)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_or_hurry)
        watchdog = loop.create_task(self._watchdog())
        gc.collect()  # and what is left lives as long as the process: no collection need look at it again
        gc.freeze()
        host, port = listener.sockets[0].getsockname()[:2]
        log.info("listening", host=host, port=port, version=__version__, pid=os.getpid(), policy=settings.decode.policy)
        self._notify("READY=1", self._status())
        self._reloading.release()
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            listener.close()
            web.pre_shutdown()
            await self._finish_requests()
            await web.shutdown(1.0)
            await self._lifecycle.releaser.close(2.0)
            watchdog.cancel()
            await self._refitter.close()
            await self._prober.close()
            if self._recorder is not None:
                await self._recorder.close()
            self._receiver.close()
            for worker in self._workers.values():
                worker.pool.close()
            log.info("stopped", unfinished=self._app.unfinished)

    # -- configuration ------------------------------------------------------------------------------------------------------

    async def _apply(self, settings: Settings) -> None:
        """Build the next Snapshot and swap it in; on any error nothing has changed. Raises ConfigError."""
        await asyncio.to_thread(files.writable, self._path, settings)
        current = self._snapshot.partition if self._snapshot else None
        partition = await asyncio.to_thread(files.partition, self._path, settings, self._receiver.geometry, current)
        client_keys, worker_keys = await asyncio.to_thread(_keys, settings)
        before = self._snapshot
        workers: dict[tuple[str, str, str], Worker] = {}
        pools: dict[str, Pool] = {}
        options = await asyncio.to_thread(self._told, settings)
        prefill_names = [w.name for w in settings.prefill.workers]
        prefill_policy = routing.build_prefill(settings.prefill.policy, workers=prefill_names)
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            row = []
            for w in getattr(settings, role).workers:
                key: tuple[str, str, str] = (role, w.name, w.url)
                worker = self._workers.get(key) or Worker(self._table, role, w.name, w.url, settings.timeouts.connect_s)
                workers[key] = worker
                row.append(worker)
            pools[role] = Pool(self._table, tuple(row))
        new = [worker for key, worker in workers.items() if key not in self._workers]
        try:
            policy = self._policy(settings, partition, options, [w.slot for w in pools["decode"].workers])
        except config.ConfigError:
            for worker in new:
                self._table.remove(worker)
            raise
        if before is not None:
            # A reload may bring new workers only; requests must not find all of them unknown.
            await self._prober.meet(new, settings.health)
        self._receiver.events.watch({w.name: w.kv_events for w in settings.prefill.workers if w.kv_events})
        for worker in workers.values():
            worker.pool.connect_timeout_s = settings.timeouts.connect_s
        self._options = options
        removed = [worker for key, worker in self._workers.items() if key not in workers]
        self._workers = workers
        self._watch.idle_s = settings.timeouts.idle_s
        self._snapshot = Snapshot(
            generation=1 if before is None else before.generation + 1,
            settings=settings,
            prefill=pools["prefill"],
            decode=pools["decode"],
            prefill_policy=prefill_policy,
            decode_policy=policy,
            partition=partition,
            client_keys=client_keys,
            worker_headers=b"".join(b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in worker_keys.items()),
        )
        self._admission.configure(settings.limits.requests, settings.limits.queue)
        # Only now: until here new requests were given the old pools.
        for worker in removed:
            self._table.remove(worker)
            worker.pool.close()
        self._metrics.workers = frozenset(worker.name for worker in workers.values())
        self._metrics.generation.set(self._snapshot.generation)
        self._prober.watch(workers.values(), settings.health, worker_keys)
        await self._refitter.configure(settings.refit, partition_source.state_path(settings))
        await self._switch_capture(settings, before)

    def _told(self, settings: Settings) -> routing.Options:
        """What the policies are told; reads the rank map, so runs off the loop."""
        u = settings.union
        return routing.Options(
            second_nearest=settings.decode.second_nearest,
            labels=settings.domain.workers,
            step=StepTime(u.base_ms, u.expert_ms, u.request_ms),
            learn=u.learn,
            weight=u.weight,
            ranks=files.ranks(self._path, settings),
            guard=settings.guarded.guard,
            guarded_tau=settings.guarded.tau,
            soft_guard=settings.soft.guard,
            pull=settings.soft.pull,
        )

    def _policy(
        self, settings: Settings, partition: Partition | None, options: routing.Options, slots: list[int]
    ) -> Policy:
        """The decode policy, which takes over what the one before knows of running requests."""
        try:
            return routing.build(
                settings.decode.policy,
                partition=partition,
                workers=[w.name for w in settings.decode.workers],
                tau=settings.decode.tau,
                options=options,
                slots=slots,
                before=self._snapshot.decode_policy if self._snapshot else None,
            )
        except ValueError as e:
            raise config.ConfigError(f"{self._path}: decode.policy = {settings.decode.policy!r}: {e}") from None

    def _refitted(self, partition: Partition) -> None:
        """Route by another partition from now on; nothing else changes."""
        now = self.current()
        slots = [w.slot for w in now.decode.workers]
        policy = self._policy(now.settings, partition, self._options, slots)
        self._snapshot = replace(now, partition=partition, decode_policy=policy)

    async def _switch_capture(self, settings: Settings, before: Snapshot | None) -> None:
        old = before and before.settings.capture
        if self._recorder is not None and old != settings.capture:
            recorder, self._recorder = self._recorder, None
            await recorder.close()
        if self._recorder is None and settings.capture.dir:
            self._recorder = Recorder(settings.capture.dir, settings.capture.max_bytes, self._metrics, self._receiver)

    def _captured(self, signature: Signature, output_tokens: int, label: str | None) -> None:
        if self._recorder is not None:
            self._recorder.add(signature, output_tokens, label)

    async def _reload(self) -> None:
        async with self._reloading:
            self._notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
            failed = ""
            try:
                settings = await asyncio.to_thread(config.load, self._path)
                await self._apply(settings)
            except Exception as e:
                # Whatever it is, the daemon goes on with what it has.
                problems = str(e).splitlines() if isinstance(e, config.ConfigError) else [type(e).__name__]
                failed = f"; the last reload failed: {problems[0]}"
                self._metrics.reloads.labels("failed").inc()
                log.error("reload_failed", problems=problems, kept_generation=self.current().generation)
            else:
                logs.configure(settings.log.level)
                self._metrics.reloads.labels("ok").inc()
                fixed = [k for k in _FIXED if attrgetter(k)(settings) != attrgetter(k)(self._started_with)]
                if fixed:
                    log.warning("restart_needed", keys=fixed)
                log.info("reloaded", generation=self.current().generation, policy=settings.decode.policy)
            self._notify("READY=1", self._status() + failed)

    # -- end ----------------------------------------------------------------------------------------------------------------

    def _stop_or_hurry(self) -> None:
        if self._stop.is_set():
            log.warning("second_signal", unfinished=self._app.running)
            os._exit(1)
        self._stop.set()

    async def _drain(self) -> None:
        """/ready fails first, so that balancers look away before the listener closes."""
        drain = self.current().settings.drain
        self._admin.draining = True
        # systemd kills at TimeoutStopSec who has not asked for more.
        extend = f"EXTEND_TIMEOUT_USEC={int((drain.delay_s + drain.timeout_s + 10) * 1e6)}"
        self._notify("STOPPING=1", extend, f"STATUS=draining, requests running: {self._app.running}")
        log.info("draining", running=self._app.running)
        await asyncio.sleep(drain.delay_s)

    async def _finish_requests(self) -> None:
        deadline = time.monotonic() + self.current().settings.drain.timeout_s
        while self._app.running and time.monotonic() < deadline:  # noqa: ASYNC110, a drain is no hot path
            await asyncio.sleep(0.02)
        self._app.unfinished = self._app.running

    # -- surroundings -------------------------------------------------------------------------------------------------------

    def _status(self) -> str:
        return f"STATUS=listening on {self._started_with.server.listen}, policy {self.current().settings.decode.policy}"

    def _notify(self, *lines: str) -> None:
        self._notifier.notify("\n".join(lines))

    async def _watchdog(self) -> None:
        """Tell systemd that the loop turns, at half the interval it asks for (sd_watchdog_enabled(3))."""
        interval_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        if not interval_us or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return
        while True:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(interval_us / 2e6)

    def _worker_changed(self, worker: Worker) -> None:
        log.info("worker_up" if worker.up else "worker_down", role=worker.role, worker=worker.name)

    def _live_metrics(self) -> None:
        """Gauges read from the state when scraped."""

        def per_worker(read: str) -> Iterable[Sample]:
            for w in self._workers.values():
                value = self._table.in_flight[w.slot] if read == "in_flight" else getattr(w, read)
                yield (w.role, w.name), float(value)

        live, labels = self._metrics.live, ("role", "worker")
        live("eldrd_in_flight", "Requests under way.", labels, lambda: per_worker("in_flight"))
        live("eldrd_worker_usable", "Whether requests may go to the worker.", labels, lambda: per_worker("usable"))
        live("eldrd_worker_breaker_opened", "Times the breaker opened.", labels, lambda: per_worker("opened"))
        live("eldrd_handoffs_open", "Hand-offs not ended.", (), lambda: [((), float(len(self._ledger)))])
        live("eldrd_requests_running", "Client requests under way.", (), lambda: [((), float(self._app.running))])
        live(
            "eldrd_requests_waiting",
            "Requests that wait for a place.",
            (),
            lambda: [((), float(self._admission.waiting))],
        )
        live("eldrd_log_lines_dropped", "Log lines dropped.", (), lambda: [((), float(logs.dropped()))])

        gauges.of_policy(live, self.current)
        gauges.of_cache(live, self._cache)
        live("eldrd_refit_requests", "Window of the refit.", (), lambda: [((), float(self._refitter.requests))])
        for outcome in OUTCOMES:
            self._metrics.handoffs.labels(outcome)


def _keys(settings: Settings) -> tuple[frozenset[bytes], dict[str, str]]:
    """Hashes of the clients' keys, and the header that carries the workers' key; runs off the loop."""
    clients = config.keys(settings.auth.client_keys_file, "auth.client_keys_file")
    workers = config.keys(settings.auth.worker_key_file, "auth.worker_key_file")
    return auth.digests(clients), {"Authorization": f"Bearer {workers[0]}"} if workers else {}


def _compile() -> None:
    """Compile (or load from the disk cache) every Numba kernel that a request can meet."""
    signature_cache.warm_up()
    routing.warm_up()
    cluster.warm_up()


def serve(path: Path) -> int:
    """Run the daemon in this process; its exit status: 0 after a drain, 2 for a configuration that cannot be used."""
    try:
        settings = config.load(path)
    except config.ConfigError as e:
        sys.stderr.write(f"eldrd: {e}\n")
        return 2
    logs.configure(settings.log.level)
    yield_to_loop()

    async def main() -> None:
        await Daemon(path, settings).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except config.ConfigError as e:
        sys.stderr.write(f"eldrd: {e}\n")
        return 2
    except OSError as e:
        sys.stderr.write(f"eldrd: {path}: {e}\n")
        return 1
    finally:
        logs.close()
    return 0
