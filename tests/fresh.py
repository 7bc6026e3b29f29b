"""Runs code as ``python -c`` does, in a process in which PyTorch has been imported and nothing of this library.

To import PyTorch takes a second or two, most of what such a test takes. So it is imported once, and each process is a
fork of the one that did.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SERVER = """
import json, os, sys, traceback
import torch

def serve(code, env, out, err):
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), number)
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    process = os.fork()
    if not process:
        serve(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run(code: str, env: Mapping[str, str] | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process.

    Args:
        code: What to run.
        env: Its environment, the present one if not given. PyTorch has been imported in another one.
        check: Whether a failure is an error here.

    Returns:
        What it printed, and its status.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        print(json.dumps([code, dict(env or os.environ), out.name, err.name]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        printed, said = Path(out.name).read_text(), Path(err.name).read_text()
    assert not (check and status), said
    return subprocess.CompletedProcess(["python", "-c", code], status, printed, said)
