"""The watch and the barrier by themselves: what is a race, what orders, and what is said."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine import Barrier, ClusterBarrier, MachineError, Names, Order, RaceError, Tensors, Watch

PLACE = np.array([1])


class _Names(Names):
    def place(self, place: int) -> str:
        return f"tile[{place}]"

    def actor(self, actor: int) -> str:
        return f"role {actor}"

    def line(self, line: int) -> str:
        return f"line {line}"


def _watch(actors: int = 3) -> Watch:
    return Watch(2, actors, _Names())


def _tell(watch: Watch, sender: int, receiver: int) -> None:
    watch.learn(receiver, watch.message(sender))


def test_a_barrier_between_a_write_and_a_read_orders_them() -> None:
    watch = _watch()
    watch.write(0, PLACE, line=7)
    with pytest.raises(RaceError, match=r"role 1 reads tile\[1\], and nothing .* the write of role 0 at line 7"):
        watch.read(1, PLACE)
    _tell(watch, 0, 1)
    watch.read(1, PLACE)


def test_knowledge_is_of_what_was_before_the_arrival_and_goes_on_through_others() -> None:
    watch = _watch()
    watch.write(0, PLACE, line=1)
    _tell(watch, 0, 1)
    _tell(watch, 1, 2)
    watch.read(2, PLACE)
    _tell(watch, 2, 0)
    watch.write(0, PLACE, line=2)
    with pytest.raises(RaceError, match="line 2"):
        watch.read(1, PLACE)


def test_a_write_waits_for_every_reader() -> None:
    watch = _watch()
    watch.write(0, PLACE, line=1)
    for reader in (1, 2):
        _tell(watch, 0, reader)
        watch.read(reader, PLACE)
    _tell(watch, 2, 0)
    with pytest.raises(RaceError, match=r"role 0 writes tile\[1\], which role 1 may still have to read"):
        watch.write(0, PLACE, line=2)
    _tell(watch, 1, 0)
    watch.write(0, PLACE, line=2)


def test_products_of_two_roles_hold_one_buffer_until_both_are_waited_for() -> None:
    watch = _watch()
    stamp = watch.start_load(0, PLACE, 1, "copy")
    for reader in (1, 2):
        watch.learn(reader, watch.message(0, stamp))
    stamps = {reader: [watch.start_read(reader, PLACE, "product") for _ in range(2)] for reader in (1, 2)}
    # The first of two, which is not the last that reads.
    watch.learn_end(1, stamps[1][0])
    _tell(watch, 1, 0)
    watch.learn_end(2, stamps[2][1])
    _tell(watch, 2, 0)
    watch.learn_end(0, stamp)
    with pytest.raises(RaceError, match="a product of role 1 may still have to read"):
        watch.start_load(0, PLACE, 2, "copy")
    watch.learn_end(1, stamps[1][1])
    _tell(watch, 1, 0)
    watch.start_load(0, PLACE, 2, "copy")


def test_a_load_is_known_to_who_waits_for_its_barrier_and_to_nobody_else() -> None:
    watch, barrier = _watch(), Barrier("full[0]")
    barrier.init(1)
    barrier.arrive(1, watch.message(0), expected=64)
    stamp = watch.start_load(0, PLACE, 3, "copy")
    message = watch.message(0, stamp)
    assert not barrier.is_over(0) and "0 of 1 arrivals and 64 bytes are missing" in barrier.awaited(0)
    with pytest.raises(RaceError, match="the write of a copy at line 3"):
        watch.read(0, PLACE)
    barrier.land(64, message)
    assert barrier.is_over(0) and not barrier.is_over(1)
    watch.learn(1, barrier.message)
    watch.read(1, PLACE)


@pytest.mark.parametrize("by", ["writer", "reader", "nobody", "reader too early"])
def test_a_proxy_fence_stands_between_stores_and_a_copy(by: str) -> None:
    watch = _watch()
    if by == "reader too early":
        watch.fence(1)
    watch.write(0, PLACE, line=5)
    if by == "writer":
        watch.fence(0)
    _tell(watch, 0, 1)
    if by == "reader":
        watch.fence(1)
    if by in ("writer", "reader"):
        watch.start_read(1, PLACE, "copy")
        return
    for start in (lambda: watch.start_read(1, PLACE, "copy"), lambda: watch.start_load(1, PLACE, 6, "copy")):
        with pytest.raises(RaceError, match=r"a copy of role 1 .* without a proxy fence after the write of role 0"):
            start()


def test_who_waited_for_copies_by_threads_fences_and_knows_of_nothing_else() -> None:
    watch = _watch()
    watch.write(0, np.array([0]), line=1)
    stamp = watch.start_load(0, PLACE, line=2)
    watch.fence(0)
    watch.learn(1, watch.end_of(0, [stamp]))
    watch.read(1, PLACE)
    with pytest.raises(RaceError, match="a product of role 1 reads .* without a proxy fence after the write of a copy"):
        watch.start_read(1, PLACE, "product")
    watch.fence(1)
    watch.start_read(1, PLACE, "product")
    with pytest.raises(RaceError, match=r"role 1 reads tile\[0\], and nothing"):
        watch.read(1, np.array([0]))


def test_who_writes_the_same_or_another_part_races_with_nobody() -> None:
    watch = _watch()
    watch.write(0, PLACE, line=1)
    watch.write(1, PLACE, line=2, same=lambda: True)
    watch.write(2, PLACE, line=3, is_part=True)
    with pytest.raises(RaceError, match="role 0 writes"):
        watch.write(0, PLACE, line=4, same=lambda: False)


def test_what_a_copy_writes_is_known_to_who_waited_for_it_and_releases_that() -> None:
    """Two programs of one actor each; the second acquires what the first releases, but for its copy in flight."""
    names = _Names()
    tensors = Tensors(2, names.actor, names.line)
    first, second = (Watch(0, 1, names, number, 2) for number in range(2))
    out, flag = tensors.tensor("out", 64, 64), tensors.tensor("flag", 4096, 4)
    for place in (0, 1):
        tensors.write(first, 0, out, np.array([place]), line=place, copies=True)
    tensors.copies_are_over(first, 0, left=1)
    tensors.synchronise(first, 0, flag, 0, Order.of("release", "gpu"))
    tensors.synchronise(second, 0, flag, 0, Order.of("acquire", "gpu"))
    tensors.read(second, 0, out, np.array([0]))
    with pytest.raises(RaceError, match="role 1 reads byte 2 of out, .* the write of a copy of role 0 at line 1"):
        tensors.read(second, 0, out, np.array([1]))
    with pytest.raises(RaceError, match="role 0 writes byte 0 of out, which role 1 may still have to read"):
        tensors.write(first, 0, out, np.array([0]), line=2)


def test_a_barrier_counts() -> None:
    barrier = Barrier("empty[1]")
    with pytest.raises(MachineError, match="before it is initialised"):
        barrier.is_over(0)
    barrier.init(2)
    with pytest.raises(MachineError, match="twice"):
        barrier.init(2)
    barrier.arrive(1, None)
    with pytest.raises(MachineError, match=r"empty\[1\]: 2 arrivals where 1 of 2 are awaited"):
        barrier.arrive(2, None)
    barrier.arrive(1, None)
    assert barrier.phase == 1 and barrier.is_over(0) and not barrier.is_over(1)


def test_programs_of_a_cluster_know_of_each_other_and_have_memory_of_their_own() -> None:
    first = _watch()
    second = Watch(2, 3, _Names(), mate=first)
    first.write(0, PLACE, line=1)
    second.write(1, PLACE, line=2)
    first.fence(0)
    with pytest.raises(RaceError, match="role 0 writes .* after the write of role 1 at line 2"):
        first.start_move(0, PLACE, second, PLACE, line=3)
    _tell(second, 1, 0)
    with pytest.raises(RaceError, match="a copy of role 0 writes .* without a proxy fence"):
        first.start_move(0, PLACE, second, PLACE, line=3)
    second.fence(1)
    stamp = first.start_move(0, PLACE, second, PLACE, line=3)
    with pytest.raises(RaceError, match="which a copy to another program may still have to read"):
        first.end(0, line=4)
    second.learn(1, first.message(0, stamp))
    second.read(1, PLACE)
    _tell(second, 1, 0)
    first.end(0, line=4)
    with pytest.raises(RaceError, match="role 2 reads"):
        first.read(2, PLACE)


def test_the_barrier_of_a_cluster_waits_for_those_who_have_not_ended() -> None:
    watch, barrier = _watch(), ClusterBarrier()
    for actor in range(3):
        barrier.join(actor)
    watch.write(0, PLACE, line=1)
    barrier.arrive(0, watch.message(0))
    barrier.arrive(1, watch.message(1))
    assert not barrier.is_over(0) and "1 of 3 are missing" in barrier.awaited(1)
    barrier.leave(2)
    assert barrier.is_over(0)
    barrier.arrive(0, watch.message(0))
    assert not barrier.is_over(0) and barrier.is_over(1)
    watch.learn(1, barrier.message(1))
    watch.read(1, PLACE)


@pytest.mark.parametrize("by", ["nobody", "itself", "its copies"])
def test_a_phase_ends_after_all_who_wait_have_seen_the_end_of_the_last(by: str) -> None:
    """Who has not would take it for the one before."""
    watch, barrier = _watch(), Barrier("full[0]")
    barrier.init(1)
    barrier.arrive(1, watch.message(0))
    barrier.seen_by("role 1", watch.wait(1))
    if by == "nobody":
        with pytest.raises(RaceError, match=r"phase 1 of full\[0\] ends, .* after role 1 has seen the end of phase 0"):
            barrier.arrive(1, watch.message(0))
        return
    watch.learn(0, watch.message(1) if by == "itself" else watch.end_of(1, []))
    barrier.arrive(1, watch.message(0))
