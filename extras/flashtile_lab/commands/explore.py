"""``flashtile-lab explore``: writes the explorer's page, and opens or serves it."""

from __future__ import annotations

import functools
import tempfile
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from flashtile.core.errors import InvalidInputError
from flashtile_lab import explore as explorer

Out = Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")]
Serve = Annotated[bool, typer.Option("--serve", help="Serve the page on this machine until interrupted.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0 takes a free one.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")]


def explore(
    out: Out = Path("flashtile-explore.html"), serve: Serve = False, port: Port = 8421, opens: Open = True
) -> None:
    """See attention at work in a browser, on numbers that the library computes.

    Writes one self-contained page, which needs no network and no server, and opens it.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
        path = explorer.write(out).resolve()
    except OSError as error:
        raise InvalidInputError("--out", f"cannot write to {out}: {error.strerror or error}") from None
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    if serve:
        _serve(path.read_bytes(), port, opens)
    elif opens and not webbrowser.open(path.as_uri()):
        typer.echo("No browser was found: open the file in one.")


class _Page(BaseHTTPRequestHandler):
    """Answers every request for / with the page."""

    def __init__(self, content: bytes, *args: object) -> None:
        self.content = content
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args: object) -> None:
        """Nothing: the page is asked for once."""


def _serve(content: bytes, port: int, opens: bool) -> None:
    """Serves the page to this machine alone."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Page, content))
    except OSError as error:
        raise InvalidInputError("--port", f"{port} cannot be used: {error.strerror or error}") from None
    with server:
        address = f"http://127.0.0.1:{server.server_port}/"
        typer.echo(f"{address} (Ctrl+C ends it)")
        if opens:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
