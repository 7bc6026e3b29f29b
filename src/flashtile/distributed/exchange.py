"""Exchanges between ranks: rows around a ring, heads for rows, and before both a comparison of the calls.

Nothing here waits for a GPU except ``agree`` and ``any_of``. Waiting for NCCL orders streams; waiting for gloo blocks
the process.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.core.errors import ExchangeError, InvalidInputError, shown

T = TypeVar("T")
# PyTorch 2.13 renamed both functions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankLine:
    """The ranks along one dimension of a mesh, in order.

    Args:
        group: Their process group; None if the mesh has no such dimension. Only a weak reference is kept: plans keep
            lines for later calls, and a group with its threads and connections must end with ``destroy_process_group``.
        rank: The index of this process among the members.
        members: The ranks of the members among all processes.
    """

    def __init__(self, group: Any, rank: int, members: tuple[int, ...]) -> None:
        self._group, self.rank, self.members = None if group is None else weakref.ref(group), rank, members

    @property
    def group(self) -> Any:
        """The members' process group; None if the mesh has no such dimension.

        Raises:
            InvalidInputError: The group was destroyed.
        """
        found = None if self._group is None else self._group()
        if found is None and self._group is not None:
            raise InvalidInputError("mesh", "is of a process group that was destroyed")
        return found

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)


class Ranks:
    """The ranks of a mesh, which share a sequence. Compared by identity.

    Attributes:
        ring: The line along which keys travel.
        ulysses: The line along which heads are exchanged. Its ranks hold neighbouring shards.
        members: The ranks among all processes, in the order of their shards.
    """

    def __init__(self, ring: RankLine, ulysses: RankLine, members: tuple[int, ...]) -> None:
        self.ring, self.ulysses, self.members = ring, ulysses, members

    @property
    def rank(self) -> int:
        """The number of this process's shard."""
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    @property
    def lines(self) -> list[RankLine]:
        """The lines with more than one rank."""
        return [line for line in (self.ulysses, self.ring) if line.size > 1]


_known: dict[int, tuple[weakref.ref[DeviceMesh], Ranks]] = {}


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The lines of a mesh. A mesh of one dimension is a ring, unless the dimension is called "ulysses".

    Raises:
        InvalidInputError: The mesh has other dimensions, or does not contain this process.
    """
    place = id(mesh)
    found = _known.get(place)
    if found is None or found[0]() is not mesh:
        if not isinstance(mesh, DeviceMesh):
            raise InvalidInputError("mesh", f"is {shown(mesh)}, must be a DeviceMesh")
        found = _known[place] = weakref.ref(mesh, lambda _: _known.pop(place, None) and None), _read(mesh)
    return found[1]


def _read(mesh: DeviceMesh) -> Ranks:
    names = mesh.mesh_dim_names or (("ring",) if mesh.ndim == 1 else ())
    if mesh.ndim == 1 and names[0] != "ulysses":
        names = ("ring",)
    if not (names and set(names) <= {"ring", "ulysses"}):
        have = f"the dimensions {', '.join(names)}" if names else f"{mesh.ndim} dimensions without names"
        must = "must have one, or two named ring and ulysses; of a larger mesh take mesh['ring', 'ulysses']"
        raise InvalidInputError("mesh", f"has {have}, {must}")
    if mesh.get_coordinate() is None:
        raise InvalidInputError("mesh", f"has no rank {dist.get_rank()}, which is this process")
    lines = dict.fromkeys(("ring", "ulysses"), RankLine(None, 0, (dist.get_rank(),)))
    for dim, name in enumerate(names):
        group = mesh.get_group(dim)
        lines[name] = RankLine(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))
    members = mesh.mesh if names[0] == "ring" else mesh.mesh.t()
    return Ranks(lines["ring"], lines["ulysses"], tuple(members.flatten().tolist()))


def named(what: str, peers: Sequence[int], action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs an action. A RuntimeError of the process group becomes an ``ExchangeError``."""
    try:
        return action(*args, **kwargs)
    except RuntimeError as error:
        raise ExchangeError(what, peers, str(error)) from error


class Pending:
    """Sends and receives under way. Before ``wait``, sent tensors must not be written and received ones not read.

    On a GPU they run on the process group's own stream, after all work queued before and beside work queued later.
    ``wait`` makes the current stream wait.
    """

    __slots__ = ("_kept", "_waits", "_what")

    def __init__(self, what: str = "", waits: Sequence[tuple[Any, Sequence[int]]] = (), *kept: object) -> None:
        self._what, self._waits, self._kept = what, waits, kept

    def wait(self) -> None:
        """Waits for all transfers.

        Raises:
            ExchangeError: Names the exchange and the peers.
        """
        for work, peers in self._waits:
            named(self._what, peers, work.wait)
        self._waits, self._kept = (), ()


NOTHING = Pending()


class Parcel(NamedTuple):
    """Contiguous tensors that travel together.

    Attributes:
        tensors: Tensors for keys and tensors for values, each in parts that the receiver stores one after another.
            Empty where one is not sent.
        peer: The index on the line of the sender or the receiver.
        kind: "keys"; "sums": sums of gradients on their way; "back": such sums on the way home to their owner.
    """

    tensors: tuple[tuple[Tensor, ...], ...]
    peer: int
    kind: str


class Messages:
    """Sends and receives of a ring's stages, through the process group.

    Args:
        line: The ring.
    """

    def __init__(self, line: RankLine) -> None:
        self._line = line

    def room(self, kind: str, number: int, part: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor that a stage receives into.

        Args:
            kind: As in ``Parcel``.
            number: The stage's number.
            part: The index of the tensor in the parcel.
            shape: Its shape.
            like: A tensor on the same device.
            dtype: Its dtype.
        """
        return torch.empty(shape, dtype=dtype, device=like.device)

    def post(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Posts all transfers of a stage. Between two ranks, tensors arrive in the order in which they left.

        Raises:
            ExchangeError: Names the stage and the peers.
        """
        if not (sends or receives):
            return NOTHING
        group, what = self._line.group, stage_name(number)
        ops = [
            dist.P2POp(operation, x, group=group, group_peer=parcel.peer)
            for operation, parcels in ((dist.isend, sends), (dist.irecv, receives))
            for parcel in parcels
            for parts in parcel.tensors
            for x in parts
        ]
        peers = [self._line.members[op.group_peer] for op in ops]
        works = named(what, peers, dist.batch_isend_irecv, ops)
        if len(works) == len(peers):  # else they are one
            return Pending(what, [(work, (peer,)) for work, peer in zip(works, peers, strict=True)], ops)
        return Pending(what, [(work, sorted(set(peers))) for work in works], ops)


def stage_name(number: int) -> str:
    """The name of a stage's exchange in errors."""
    return f"the exchange during step {number} of the ring"


def all_to_all(line: RankLine, what: str, sent: Tensor, rows_to: Sequence[int], rows_from: Sequence[int]) -> Tensor:
    """Sends rows of a contiguous tensor to all ranks: the first ``rows_to[0]`` rows to the first rank, and so on.

    Returns:
        The rows received, in the order of the ranks.
    """
    received = sent.new_empty((sum(rows_from), *sent.shape[1:]))
    splits = list(rows_from), list(rows_to)
    named(what, line.members, dist.all_to_all_single, received, sent, *splits, group=line.group)
    return received


def gather(line: RankLine, what: str, given: Sequence[Tensor], most: int) -> tuple[Any, Pending]:
    """Posts the gathering of all ranks' tensors. Results are ``(ranks, most, ...)``; each rank fills its first rows."""
    found, waits = [], []
    for x in given:
        if x.shape[0] < most:
            x = torch.cat([x, x.new_zeros((most - x.shape[0], *x.shape[1:]))])
        everyone = x.new_empty((line.size * most, *x.shape[1:]))
        waits.append(
            (named(what, line.members, _all_gather, everyone, x, group=line.group, async_op=True), line.members)
        )
        found.append(everyone.unflatten(0, (line.size, most)))
    return tuple(found), Pending(what, waits, given)


def scatter_sums(line: RankLine, what: str, given: Sequence[Tensor]) -> tuple[list[Tensor], Pending]:
    """Posts the sums over ranks of contiguous tensors ``(ranks, ...)``; this rank receives the sums of its part."""
    found, waits = [], []
    for x in given:
        total = torch.empty_like(x[0])
        work = named(what, line.members, _reduce_scatter, total, x.flatten(0, 1), group=line.group, async_op=True)
        waits.append((work, line.members))
        found.append(total)
    return found, Pending(what, waits, given)


def add_up(ranks: Ranks, what: str, x: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    for line in ranks.lines:
        named(what, line.members, dist.all_reduce, x, group=line.group)
    return x


def any_of(line: RankLine, what: str, like: Tensor, said: bool) -> bool:
    """Whether ``said`` is true on any rank of a line. Waits for the GPU."""
    found = torch.tensor([int(said)], device=like.device)
    named(what, line.members, dist.all_reduce, found, dist.ReduceOp.MAX, group=line.group)
    return bool(found.item())


def share(ranks: Ranks, what: str, x: Tensor) -> Tensor:
    """The first rank's tensor, in place."""
    for line in ranks.lines[::-1]:
        named(what, line.members, dist.broadcast, x, group_src=0, group=line.group)
    return x


# Bytes of the record in which a rank describes its call.
_RECORD = 6144


def agree(ranks: Ranks, device: torch.device, said: Mapping[str, object]) -> list[dict[str, Any]]:
    """Exchanges a record of each rank's call with all ranks. Waits for them, and for the GPU.

    Args:
        ranks: The ranks; all of them take part.
        device: The device of the process group's tensors.
        said: JSON values by name, some kilobytes at most; see ``shortened``.

    Returns:
        The records of all ranks, in the order of their shards.
    """
    text = json.dumps(said).encode().ljust(_RECORD)
    assert len(text) == _RECORD, "a record is too long"
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)[None]
    for line in ranks.lines:
        (gathered,), pending = gather(line, "the comparison of this call with theirs", [found], found.shape[0])
        pending.wait()
        found = gathered.flatten(0, 1)
    everything = bytes(found.flatten().tolist())
    return [json.loads(everything[i : i + _RECORD]) for i in range(0, len(everything), _RECORD)]


def shortened(value: object) -> object:
    """A JSON value; if it is long, its beginning and a hash."""
    text = json.dumps(value)
    return value if len(text) <= 160 else f"{text[:100]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def refuse_differences(ranks: Ranks, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises if ranks were called with different arguments. All ranks raise the same error.

    Raises:
        InvalidInputError: Names the argument and two ranks.
    """
    first = everyone[0]
    for name in first:
        for rank, record in zip(ranks.members, everyone, strict=True):
            if record[name] != first[name]:
                message = f"is {record[name]} on rank {rank}, but {first[name]} on rank {ranks.members[0]}"
                raise InvalidInputError(name, message)
