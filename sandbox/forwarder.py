"""A program for inside a box: carries 127.0.0.1:PORT to a Unix socket. Run as: python forwarder.py PORT SOCKET

Used where the host may not open sockets in the box's network namespace. Standard library only, since it runs on the
toolbox's bare Python. A closed direction is passed on as a closed direction, so streams end as they would without it.
"""

from __future__ import annotations

import asyncio
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except ConnectionError:
        writer.close()


async def main(port: int, path: str) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", port, backlog=128)
    print("listening", flush=True)  # whoever started us waits for it
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
