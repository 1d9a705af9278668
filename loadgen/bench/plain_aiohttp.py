"""A peer for the relay bench: the plainest PD proxy that aiohttp and uvloop allow. No metrics, no log, no checks.

`python -m loadgen.bench.plain_aiohttp PORT PREFILL_URL DECODE_URL...`; decode servers take turns.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import orjson
import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_JSON = {"Content-Type": "application/json"}
_HAND_OFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(prefill: str, decode: list[str]) -> web.Application:
    """prefill, decode: base URLs of the servers."""
    turns = itertools.cycle(decode)
    session: ClientSession

    async def sessions(_: web.Application) -> AsyncIterator[None]:
        nonlocal session
        connector = TCPConnector(limit=0, keepalive_timeout=60)
        async with ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as session:
            yield

    async def handle(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": _HAND_OFF}
        first.pop("stream_options", None)
        async with session.post(prefill + request.path, data=orjson.dumps(first), headers=_JSON) as answer:
            answer.raise_for_status()
            body["kv_transfer_params"] = orjson.loads(await answer.read())["kv_transfer_params"]
        async with session.post(next(turns) + request.path, data=orjson.dumps(body), headers=_JSON) as answer:
            if not body.get("stream"):
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
            headers = {"Content-Type": answer.headers["Content-Type"]}
            relayed = web.StreamResponse(status=answer.status, headers=headers)
            await relayed.prepare(request)
            async for piece in answer.content.iter_any():
                await relayed.write(piece)
            await relayed.write_eof()
            return relayed

    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(sessions)
    app.router.add_post("/v1/completions", handle)
    return app


def main(port: int, prefill: str, *decode: str) -> None:
    """Serve until SIGTERM."""
    app = application(prefill, list(decode))
    loop = uvloop.new_event_loop()
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, loop=loop, print=None, backlog=4096)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
