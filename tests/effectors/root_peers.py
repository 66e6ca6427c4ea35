"""A root helper that says what a test wants it to say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def answering(tmp_path: Path, *answers: bytes | None) -> AsyncIterator[tuple[Path, list[bytes]]]:
    """A socket that gives these answers, one for each connection (None: none, ever), and what it was asked."""
    path, asked, left = tmp_path / "helper.sock", list[bytes](), list(answers)
    never = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        result = left.pop(0) if left else answers[-1]
        if result is None:
            await never.wait()
        else:
            writer.write(result)
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield path, asked
    finally:
        never.set()
        server.close()
        await server.wait_closed()
