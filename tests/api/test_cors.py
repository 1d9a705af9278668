"""What a browser is told before it sends a request (Fetch standard, CORS preflight)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stack

OPENAI_CLIENT = ("authorization", "content-type", "x-stainless-lang", "x-stainless-os", "openai-organization")


@pytest.mark.parametrize("sections", [{"cors": {"origins": ["https://chat.example.com"]}}])
async def test_openai_client_in_a_browser_may_send_its_headers(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://chat.example.com\r\n"
        b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: %b\r\n\r\n"
        % ",".join(OPENAI_CLIENT).encode()
    )
    lines = (await client.head()).decode().lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if line)
    allowed = {name.strip() for name in fields["access-control-allow-headers"].split(",")}
    # The star stands for every name but authorization.
    assert "authorization" in allowed
    assert "*" in allowed or allowed.issuperset(OPENAI_CLIENT)
    assert fields["access-control-allow-origin"] == "https://chat.example.com"
    client.close()
