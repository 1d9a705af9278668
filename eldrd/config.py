"""eldrd.toml and ELDRD_SECTION_KEY to frozen settings: every key with its unit, default and bounds, once. Opens no socket."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX = "ELDRD_"
_ZMQ = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5}|\*)|ipc://\S+")

DecodePolicy = Literal["random", "round_robin", "jsq", "p2c", "domain", "eldr", "union", "guarded_band", "soft_band"]
PrefillPolicy = Literal["prefix_hash", "jsq", "round_robin"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file or variable, the key, the value and what is allowed."""


class Address(str):
    """``host:port`` (``[::1]:8100`` for IPv6) with the two parts at hand."""

    __slots__ = ("host", "port")
    host: str
    port: int

    def __new__(cls, text: str) -> Address:
        host, sep, port = text.rpartition(":")
        if not sep or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise ValueError("must be host:port with a port from 0 to 65535")
        if host.startswith("["):
            if not host.endswith("]"):
                raise ValueError("must be [address]:port for IPv6")
            host = host[1:-1]
            ipaddress.IPv6Address(host)
        elif not host or ":" in host:
            raise ValueError("must be host:port, or [address]:port for IPv6")
        self = super().__new__(cls, text)
        self.host, self.port = host, int(port)
        return self


def _check_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://host:port or https://host:port")
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError("must not have a path, query, fragment or user")
    _ = parts.port
    return f"{parts.scheme}://{parts.netloc}"


def _check_zmq(text: str) -> str:
    if not _ZMQ.fullmatch(text):
        raise ValueError("must be tcp://address:port or ipc://path")
    return text


Url = Annotated[str, AfterValidator(_check_url)]
Listen = Annotated[str, AfterValidator(Address)]
ZmqEndpoint = Annotated[str, AfterValidator(_check_zmq)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Section(BaseModel):
    """A table of the file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Server(Section):
    listen: Listen = Field("127.0.0.1:8100", description="address and port for clients")
    max_body_bytes: int = Field(64 << 20, ge=1024, le=4 << 30, description="larger request bodies are answered 413")
    keepalive_s: Seconds = Field(75.0, description="an idle client connection is closed after this")
    backlog: int = Field(4096, ge=1, le=65_535, description="listen backlog")


class Auth(Section):
    client_keys_file: str = Field("", description="one API key a line; clients must send one; empty: no key needed")
    worker_key_file: str = Field("", description="the API key sent to the workers; empty: none")


class Cors(Section):
    origins: tuple[str, ...] = Field((), description='browser origins that may call, or "*"; empty: no CORS')


class Limits(Section):
    requests: int = Field(0, ge=0, le=1_000_000, description="requests served at once; 0: no limit")
    queue: int = Field(1024, ge=0, le=1_000_000, description="requests that may wait for a place; more get 429")


class Model(Section):
    name: str = Field(min_length=1, description="name the workers serve")
    aliases: tuple[str, ...] = Field((), description="further names that clients may use and see in answers")


class Worker(Section):
    name: Name = Field(description="label in metrics, logs, partitions")
    url: Url = Field(description="base URL of the vLLM server")


class PrefillWorker(Worker):
    kv_events: ZmqEndpoint | Literal[""] = Field("", description="where its KV cache events are; empty: nowhere")


class _Pool(Section):
    workers: tuple[Worker, ...] = Field(min_length=1, description="the vLLM servers of this role")

    @model_validator(mode="after")
    def _distinct(self) -> _Pool:
        for key in ("name", "url"):
            values = [getattr(w, key) for w in self.workers]
            double = next((v for v in values if values.count(v) > 1), None)
            if double is not None:
                raise ValueError(f"two workers have the {key} {double!r}; each must have its own")
        return self


class Prefill(_Pool):
    workers: tuple[PrefillWorker, ...] = Field(min_length=1, description="the vLLM servers of this role")
    policy: PrefillPolicy = Field("prefix_hash", description="how a prefill worker is chosen")


class Decode(_Pool):
    policy: DecodePolicy = Field("jsq", description="how a decode worker is chosen")
    tau: float = Field(0.1, ge=0, le=2, description="width of the locality band in cosine units")
    second_nearest: bool = Field(False, description="eldr: the second nearest worker joins a band of one")


class Domain(Section):
    workers: dict[str, tuple[Name, ...]] = Field({}, description="decode workers of each X-Eldrd-Label")


class Union(Section):
    base_ms: float = Field(5.5, ge=0, le=10_000, description="time of a decode step that reads no expert")
    expert_ms: float = Field(0.2, ge=0, le=1_000, description="time that one more active expert in every layer adds")
    request_ms: float = Field(0.06, ge=0, le=1_000, description="time that one more request adds")
    learn: bool = Field(True, description="fit the three above to each worker's measured TPOT")
    weight: float = Field(1.0, ge=0, le=100, description="of what others lose against what the request itself gets")
    ep_ranks: int = Field(1, ge=1, le=1024, description="expert-parallel ranks of a worker, with consecutive experts")
    rank_map: str = Field("", description="safetensors file with ranks [L, E], where experts are not consecutive")


class Guarded(Section):
    guard: float = Field(0.1, ge=0, le=100, description="workers above (1 + guard) * mean + 1 in flight are left out")
    tau: float = Field(0.2, ge=0, le=2, description="width of guarded_band's locality band in cosine units")


class Soft(Section):
    guard: float = Field(0.4, ge=0, le=100, description="as guarded.guard, for soft_band")
    pull: float = Field(
        4.0, ge=0, le=100, description="requests' experts that a worker must save a unit of cosine away"
    )


class Partitions(Section):
    file: str = Field("", description="partition file written by `eldrd fit`; for eldr and the bands")


class Refit(Section):
    enabled: bool = Field(False, description="move the partition's centroids after the traffic, while serving")
    window_s: Seconds = Field(30.0, description="age of the signatures that a refit looks at")
    every_s: Seconds = Field(5.0, description="time between two refits")
    requests: int = Field(
        200, ge=1, le=2_000, description="fewer in the window: no refit; of more than 2000 the latest"
    )
    state: str = Field("", description="file that keeps refits for the next start; empty: partitions.file + .refit")


class Signatures(Section):
    listen: ZmqEndpoint | Literal[""] = Field("", description="ZMQ endpoint that the hooks connect to; empty: none")
    cache_bytes: int = Field(256 << 20, ge=1 << 20, le=1 << 40, description="budget of the block cache")
    wait_ms: float = Field(20.0, ge=0, le=10_000, description="how long a decision waits for its signature")


class Capture(Section):
    dir: str = Field("", description="directory that captures of live signatures are written to; empty: off")
    max_bytes: int = Field(1 << 30, ge=1 << 20, le=1 << 44, description="a capture stops growing here")


class Timeouts(Section):
    connect_s: Seconds = Field(5.0, description="TCP (and TLS) connect to a worker")
    prefill_s: Seconds = Field(600.0, description="prefill request sent to prefill answer received")
    first_byte_s: Seconds = Field(600.0, description="decode request sent to the head of its answer")
    idle_s: Seconds = Field(300.0, description="silence between two pieces of a decode answer")
    handoff_s: Seconds = Field(
        25.0, description="age at which a hand-off is no longer used; below the connector's lease"
    )


class Retries(Section):
    attempts: int = Field(2, ge=0, le=10, description="further tries of a leg that failed before anything was answered")


class Health(Section):
    interval_s: Seconds = Field(2.0, description="time between two probes of a worker")
    timeout_s: Seconds = Field(2.0, description="a probe that takes longer has failed")
    failures: int = Field(3, ge=1, le=100, description="failures in a row that take a worker out")
    open_s: Seconds = Field(5.0, description="how long a worker's breaker stays open")


class Drain(Section):
    delay_s: float = Field(0.0, ge=0, le=600, description="time between failing /ready and closing the listener")
    timeout_s: float = Field(60.0, ge=0, le=86_400, description="requests still running after this are ended")


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lines below this are not written")
    requests: bool = Field(True, description="one line a request")


class Settings(BaseSettings):
    """The whole configuration. Instances are immutable; a reload makes a new one."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=PREFIX, env_nested_delimiter="_", env_nested_max_split=1
    )

    server: Server = Server()
    auth: Auth = Auth()
    cors: Cors = Cors()
    limits: Limits = Limits()
    models: tuple[Model, ...] = ()
    prefill: Prefill
    decode: Decode
    domain: Domain = Domain()
    union: Union = Union()
    guarded: Guarded = Guarded()
    soft: Soft = Soft()
    partitions: Partitions = Partitions()
    refit: Refit = Refit()
    signatures: Signatures = Signatures()
    capture: Capture = Capture()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    health: Health = Health()
    drain: Drain = Drain()
    log: Log = Log()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003, the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @model_validator(mode="after")
    def _across_sections(self) -> Settings:
        served = [name for m in self.models for name in (m.name, *m.aliases)]
        double = next((n for n in served if served.count(n) > 1), None)
        if double is not None:
            raise ValueError(f"[[models]] has the name or alias {double!r} twice")
        names = [w.name for w in (*self.prefill.workers, *self.decode.workers)]
        double = next((n for n in names if names.count(n) > 1), None)
        if double is not None:
            raise ValueError(f"prefill and decode workers share the name {double!r}; each must have its own")
        policy = self.decode.policy
        if policy == "eldr" and not self.partitions.file:
            raise ValueError("decode.policy = 'eldr' needs partitions.file")
        if self.refit.enabled and not (self.partitions.file and self.signatures.listen):
            raise ValueError("refit.enabled needs partitions.file and signatures.listen")
        if policy in ("eldr", "union", "guarded_band", "soft_band") and not self.signatures.listen:
            raise ValueError(f"decode.policy = {policy!r} needs signatures.listen, where the hooks connect")
        if policy == "domain" and not self.domain.workers:
            raise ValueError("decode.policy = 'domain' needs domain.workers")
        known = {w.name for w in self.decode.workers}
        for label, workers in self.domain.workers.items():
            if not workers or not known.issuperset(workers):
                raise ValueError(f"domain.workers.{label} = {list(workers)}: must be names of decode workers")
        if not self.union.expert_ms and not self.union.request_ms:
            raise ValueError("union.expert_ms and union.request_ms must not both be 0")
        if self.union.ep_ranks > 1 and self.union.rank_map:
            raise ValueError("union.ep_ranks and union.rank_map exclude each other")
        if self.capture.dir and not self.signatures.listen:
            raise ValueError("capture.dir needs signatures.listen, where the hooks connect")
        return self


def _known_variables() -> set[str]:
    known = set()
    for section, field in Settings.model_fields.items():
        known.add(f"{PREFIX}{section}".upper())
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            known.update(f"{PREFIX}{section}_{key}".upper() for key in kind.model_fields)
    return known


def _section_keys(loc: tuple[int | str, ...]) -> list[str]:
    """The keys allowed beside the one at ``loc``."""
    model: Any = Settings
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        kind = model.model_fields[part].annotation
        args = getattr(kind, "__args__", ())
        model = args[0] if args else kind
    return sorted(model.model_fields)


def _explain(error: Any, file: Path) -> str:
    loc: tuple[int | str, ...] = error["loc"]
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
    variable = f"{PREFIX}{'_'.join(str(p) for p in loc[:2])}".upper()
    where = f"{file} ({variable})" if variable in os.environ else str(file)
    if error["type"] == "extra_forbidden":
        allowed = _section_keys(loc)
        near = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: {key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{where}: {key}: required, but missing"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{where}: {message}"
    return f"{where}: {key} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def load(path: Path | str) -> Settings:
    """Read and check ``path``, with ELDRD_* variables on top. Raises ConfigError with one line a problem."""
    path = Path(path)
    unknown = sorted(k for k in os.environ if k.startswith(PREFIX) and k.upper() not in _known_variables())
    if unknown:
        near = difflib.get_close_matches(unknown[0], _known_variables(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"environment: {unknown[0]}: unknown variable{hint}")
    try:
        text = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    try:
        values = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from None
    try:
        settings = Settings(**values)
    except ValidationError as e:
        problems = e.errors()
        # A list whose only items are wrong is also reported as too short; the item says more.
        inner = [
            p
            for p in problems
            if not any(q["loc"] != p["loc"] and q["loc"][: len(p["loc"])] == p["loc"] for q in problems)
        ]
        raise ConfigError("\n".join(_explain(p, path) for p in inner)) from None
    except ValueError as e:
        raise ConfigError(f"environment: {e}") from None
    return _resolved(settings, path.parent)


def keys(file: str, key: str) -> tuple[str, ...]:
    """The API keys in a file that the setting ``key`` names, one a line, blank lines and # comments left out. Raises
    ConfigError without their values."""
    if not file:
        return ()
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{key}: {file}: {getattr(e, 'strerror', None) or 'not text'}") from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{key}: {file}: holds no key")
    if not all(k.isascii() and k.isprintable() and " " not in k for k in found):
        raise ConfigError(f"{key}: {file}: a key has characters that a header cannot carry")
    return found


def _resolved(settings: Settings, base: Path) -> Settings:
    """Relative files are relative to the configuration's folder, so that the daemon's folder does not matter."""

    def absolute(name: str) -> str:
        return str((base / name).resolve()) if name else ""

    return settings.model_copy(
        update={
            "partitions": settings.partitions.model_copy(update={"file": absolute(settings.partitions.file)}),
            "refit": settings.refit.model_copy(update={"state": absolute(settings.refit.state)}),
            "union": settings.union.model_copy(update={"rank_map": absolute(settings.union.rank_map)}),
            "capture": settings.capture.model_copy(update={"dir": absolute(settings.capture.dir)}),
            "auth": settings.auth.model_copy(
                update={key: absolute(getattr(settings.auth, key)) for key in ("client_keys_file", "worker_key_file")}
            ),
        }
    )
