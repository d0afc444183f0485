"""Workers that somebody else runs: ``launch: {use: static, addresses: [host:port, unix:/path], secret_env: NAME}``.

With ``tls: {ca, cert, key}`` TCP connections are encrypted and both ends show a certificate; the secret is asked for
all the same. UNIX sockets never leave the machine and stay as they are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from workers.launchers.base import LaunchContext, LaunchError, WorkerExit, WorkerProcess, WorkerSpec
from workers.rpc.tls import TlsFiles, TlsFilesError


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """An address; its process is none of ours, so ``wait`` never returns and ``stop`` ends nothing."""

    address: str
    secret: str | None
    pid: int | None = None
    tls: TlsFiles | None = None

    async def wait(self) -> WorkerExit:
        """Never returns: only the connection tells whether it lives."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        """Leave it running: it may serve another gateway next."""


class StaticLauncher:
    """Hands out the configured addresses, one per worker."""

    def __init__(self, context: LaunchContext) -> None:
        """Raises LaunchError where ``addresses`` or the secret is missing."""
        if not context.addresses:
            raise LaunchError("launch.addresses is empty: name one address per worker, e.g. 10.0.0.5:9000")
        for address in context.addresses:
            _check_address(address)
        secret = context.env.get(context.secret_env) if context.secret_env else None
        if context.secret_env and not secret:
            raise LaunchError(
                f"launch.secret_env: the variable {context.secret_env} is not set; set it to the workers' secret"
            )
        tcp = [address for address in context.addresses if not address.startswith("unix:")]
        if tcp and not secret:
            raise LaunchError(f"launch.secret_env is missing: over TCP ({tcp[0]}) a worker wants a shared secret")
        self._addresses = context.addresses
        self._secret = secret
        self._tls = context.tls
        if context.tls is not None:
            try:
                context.tls.check()
            except TlsFilesError as error:
                raise LaunchError(f"launch.tls: {error}") from None

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """The address of worker ``spec.index``. Raises LaunchError when there are fewer addresses than workers."""
        if spec.index >= len(self._addresses):
            raise LaunchError(
                f"launch.count asks for worker {spec.index + 1}, launch.addresses lists {len(self._addresses)}"
            )
        address = self._addresses[spec.index]
        return StaticWorker(address, self._secret, tls=None if address.startswith("unix:") else self._tls)


def _check_address(address: str) -> None:
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return
    else:
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and 0 < int(port) < 65536:
            return
    raise LaunchError(f"launch.addresses: {address!r} is neither host:port nor unix:/path")
