"""Tests that a program trusts the authority of its cluster after somebody has replaced it."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from conveyor_kube.authorities import follow_authorities
from e2e.cluster.certificates import Authority


async def test_new_connections_trust_an_authority_of_the_same_name_once_it_is_in_the_file(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old", "ca"), Authority(tmp_path / "new", "ca")
    pair = new.issue("server", "server", names=["127.0.0.1"])
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(pair.certificate, pair.key)
    file = tmp_path / "ca.crt"
    await asyncio.to_thread(file.write_bytes, old.certificate.read_bytes())
    context = ssl.create_default_context(cafile=file)
    following = asyncio.create_task(follow_authorities(str(file), context))
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=serving) as server:
        address = server.sockets[0].getsockname()

        async def connect() -> None:
            _, writer = await asyncio.open_connection(*address, ssl=context)
            writer.close()

        with pytest.raises(ssl.SSLCertVerificationError):
            await connect()
        await asyncio.to_thread(file.write_bytes, new.certificate.read_bytes())
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(ssl.SSLCertVerificationError):
                    await connect()
                    break
                await asyncio.sleep(0.1)
    following.cancel()
