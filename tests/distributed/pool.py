"""Processes that run functions together over gloo, or on a GPU each over NCCL, started once and used by many tests.

They are forked from a server that has imported PyTorch, and wait for functions of test modules: ``Pool.run`` returns
what the ranks returned, and raises what one of them raised.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Long enough that no healthy run on a busy machine needs it, short enough that a hang ends the test.
_PATIENCE_S = 120.0
_meetings = itertools.count()


def _work(rank: int, world: int, path: str, timeout_s: float, device: str, commands: Connection) -> None:
    torch.set_num_threads(1)
    wait_s, backend = datetime.timedelta(seconds=timeout_s), "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world, timeout=wait_s)
    meshes: dict[Any, DeviceMesh] = {}
    while True:
        try:
            what, function, args = commands.recv()
        except EOFError:
            os._exit(0)
        if what not in meshes:
            meshes[what] = DeviceMesh(device, torch.tensor(what[0]), mesh_dim_names=what[1])
        try:
            inside = meshes[what].get_coordinate() is not None
            commands.send((True, function(meshes[what], *args) if inside else None))
        except BaseException as error:
            commands.send((False, (error, traceback.format_exc())))


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


class Pool:
    """So many processes, of which meshes take some.

    Args:
        world: Their number.
        timeout_s: That of their process groups.
        device: "cpu", or "cuda" for a GPU each.
    """

    def __init__(self, world: int, timeout_s: float = 60.0, device: str = "cpu") -> None:
        server = mp.get_context("forkserver")
        server.set_forkserver_preload(["torch", "torch.distributed.tensor", "flashtile.distributed", "numpy"])
        path = Path(tempfile.gettempdir()) / f"flashtile-{os.getpid()}-{next(_meetings)}"
        path.unlink(missing_ok=True)
        self.world, self.pipes, self.processes = world, [], []
        for rank in range(world):
            ours, theirs = server.Pipe()
            process = server.Process(
                target=_work, args=(rank, world, str(path), timeout_s, device, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, mesh: Any = None, names: Sequence[str] = ("ring",)
    ) -> list[Any]:
        """What ``function(mesh, *args)`` returns on each rank of the mesh, in its order.

        Args:
            function: Of a module that the processes can import.
            *args: Alike on all ranks.
            mesh: The ranks of the mesh, nested as its dimensions are; an int for the first so many, None for all.
            names: Of its dimensions.
        """
        outcomes = self.outcomes(function, *args, mesh=mesh, names=names)
        for rank, (good, found) in enumerate(outcomes):
            if not good:
                raise RankError(f"rank {rank}: {found[1]}") from found[0]
        members = torch.tensor(self._members(mesh)).flatten().tolist()
        return [outcomes[rank][1] for rank in members]

    def errors(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[BaseException | None]:
        """What each rank of the pool raised; an EOFError for one that died."""
        return [None if good else found[0] for good, found in self.outcomes(function, *args, **kwargs)]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, mesh: Any = None, names: Sequence[str] = ("ring",)
    ) -> list[tuple[bool, Any]]:
        """For each rank of the pool True and what it returned, or False, what it raised and the traceback."""
        for pipe in self.pipes:
            pipe.send(((self._members(mesh), tuple(names)), function, args))
        found: dict[Connection, tuple[bool, Any]] = {}
        while len(found) < self.world:
            ready = wait([pipe for pipe in self.pipes if pipe not in found], timeout=_PATIENCE_S)
            if not ready:
                late = [rank for rank, pipe in enumerate(self.pipes) if pipe not in found]
                self.close()
                raise TimeoutError(f"ranks {late} did not answer")
            for pipe in ready:
                try:
                    found[pipe] = pipe.recv()  # type: ignore[index,union-attr]
                except EOFError as error:
                    found[pipe] = (False, (error, "the process died"))  # type: ignore[index]
        return [found[pipe] for pipe in self.pipes]

    def _members(self, mesh: Any) -> Any:
        return tuple(range(self.world if mesh is None else mesh)) if mesh is None or isinstance(mesh, int) else mesh

    @property
    def alive(self) -> bool:
        """Whether all processes are."""
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
