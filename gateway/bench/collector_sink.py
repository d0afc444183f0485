"""``python -m gateway.bench.collector_sink``: takes OTLP over HTTP and throws it away. Prints its port."""

from __future__ import annotations

import asyncio
import sys

MAX_HEAD = 64 * 1024
_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read request after request; say 200 to each."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            await reader.readexactly(length)
            writer.write(_OK)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        writer.close()


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=MAX_HEAD)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
