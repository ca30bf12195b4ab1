"""The faults that disturb a run. Each function strikes once, and does nothing if its target does not exist now."""

from __future__ import annotations

import errno
import os
import socket
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.coordinator import requests
from tests.simulation.debugging import Person

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.wire.channel import Channel
    from tests.simulation.hosts import Host, Line
    from tests.simulation.play import Life, Play
    from tests.simulation.scenario import Fault


# -- ranks and hosts -------------------------------------------------------------------------------------------------


def kill_rank(play: Play, fault: Fault) -> None:
    if (rank := _chosen(play.ranks(), fault)) is not None:
        play.hit(rank, "is killed")
        rank.kill()


def stop_rank(play: Play, fault: Fault) -> None:
    if (rank := _chosen(play.ranks(), fault)) is not None:
        play.hit(rank, f"is stopped for {fault.lasts:g} s")
        now = play.world.now
        play.stopped.append((rank.life, rank.attempt, rank.number, now, now + fault.lasts))
        rank.process.stop()
        play.world.after(fault.lasts, rank.process.resume)


def kill_host(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        _kill_host(play, host, fault.lasts)


def _kill_host(play: Play, host: Host, lasts: float) -> None:
    play.hit_host(host, "dies")
    host.die()
    play.world.after(lasts, partial(_return, play, host))


def _return(play: Play, host: Host) -> None:
    host.is_up = True
    play.changes[host.name].append(play.world.now)


def late_host(play: Play, fault: Fault) -> None:
    """A host is not there at the beginning."""
    host = _chosen(list(play.hosts.values()), fault)
    play.world.say(f"{host.name} is not there for {fault.lasts:g} s")
    play.hit_hosts.add(host.name)
    host.is_up = False
    play.world.after(fault.lasts, partial(_return, play, host))


def sick_host(play: Play, fault: Fault) -> None:
    """A host dies, and comes back without what ranks need: none starts there for minutes."""
    if (host := _chosen(play.up(), fault)) is not None:
        host.is_sick = True
        _kill_host(play, host, fault.lasts)
        play.world.after(fault.lasts + 200, lambda: setattr(host, "is_sick", False))
        play.world.after(fault.lasts + 200, partial(_return, play, host))


def flaky_host(play: Play, fault: Fault) -> None:
    """A host dies as soon as ranks are to start there, for minutes."""
    if (host := _chosen(play.up(), fault)) is not None:
        host.is_flaky = True
        _kill_host(play, host, fault.lasts)
        play.world.after(fault.lasts + 200, lambda: setattr(host, "is_flaky", False))
        play.world.after(fault.lasts + 200, partial(_return, play, host))


def kill_agent(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, "loses its agent")
        host.agent.lose()


def kill_forkserver(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, "loses its forkserver")
        host.agent.lose_forkserver()


def kill_child(play: Play, fault: Fault) -> None:
    """Kill a process that stores, moves or serves files."""
    programs = ("uploader", "mover", "stream server")
    living = [one for one in play.world.processes if one.is_alive and one.name.startswith(programs)]
    if (victim := _chosen(living, fault)) is not None:
        play.world.say(f"the {victim.name} is killed")
        is_uploader = victim.name.startswith("uploader")
        play.hit_hosts |= (
            {victim.host.name} if is_uploader else {name for name, host in play.hosts.items() if not host.sees_storage}
        )
        victim.kill()


def stop_agent(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, f"has its agent stopped for {fault.lasts:g} s")
        agent = host.agent
        agent.process.stop()
        play.world.after(fault.lasts, agent.process.resume)


# -- links -----------------------------------------------------------------------------------------------------------


def slow_link(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, f"has a slow link for {fault.lasts:g} s")
        host.peer_delay_s = fault.lasts
        play.world.after(fault.lasts, lambda: setattr(host, "peer_delay_s", 0.0))
        for line in _lines(play, host):
            line.delay_s = fault.lasts
            play.world.after(fault.lasts, lambda line=line: setattr(line, "delay_s", 0.0))


def cut_link(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, "is cut off")
        host.is_cut_off = True
        for line in _lines(play, host):
            line.is_cut = True


def no_peers(play: Play, fault: Fault) -> None:
    """A rank on any host fails if it reads what only this one has."""
    host = _chosen(list(play.hosts.values()), fault)
    play.hit_host(host, f"reaches no other host for {fault.lasts:g} s")
    play.hit_hosts |= play.hosts.keys()
    host.refuses_peers = True
    play.world.after(fault.lasts, lambda: setattr(host, "refuses_peers", False))


# -- disks and memory ------------------------------------------------------------------------------------------------


def full_disk(play: Play, fault: Fault) -> None:
    _break_disk(play, fault, errno.ENOSPC)


def broken_disk(play: Play, fault: Fault) -> None:
    _break_disk(play, fault, errno.EIO)


def read_only_disk(play: Play, fault: Fault) -> None:
    _break_disk(play, fault, errno.EROFS)


def _break_disk(play: Play, fault: Fault, number: int) -> None:
    play.world.say(f"the disk: {os.strerror(number)}, for {fault.lasts:g} s")
    play.disk.errno, play.disk.has_room = number, number == errno.ENOSPC
    play.world.after(fault.lasts, lambda: setattr(play.disk, "errno", 0))


def slow_disk(play: Play, fault: Fault) -> None:
    name = list(play.hosts)[fault.target % len(play.hosts)]
    play.world.say(f"the disk is slow for {name}, for {fault.lasts:g} s")
    play.disk.slow[name] = 0.4
    play.world.after(fault.lasts, lambda: play.disk.slow.pop(name, None))


def full_memory(play: Play, fault: Fault) -> None:
    if (host := _chosen(play.up(), fault)) is not None:
        play.hit_host(host, f"has its memory full for {fault.lasts:g} s")
        host.memory_is_full = True
        play.world.after(fault.lasts, lambda: setattr(host, "memory_is_full", False))


def flip_memory(play: Play, fault: Fault) -> None:
    for host in play.up():
        _flip(play, fault, sorted(host.memory.glob("**/rank_*/**/*_?.*")))


def flip_disk(play: Play, fault: Fault) -> None:
    names = ("checkpoint_*/*_?.*", "checkpoint_*/state.json")
    _flip(play, fault, [file for name in names for file in sorted((play.storage / "run").glob(name))])


def _flip(play: Play, fault: Fault, files: list[Path]) -> None:
    intact = [file for file in files if file.stat().st_size and file not in play.flipped]
    if (file := _chosen(intact, fault)) is not None:
        play.world.say(f"a bit of {file.relative_to(play.root)} flips")
        play.flipped[file] = play.world.now
        with open(file, "r+b") as damaged:
            byte = damaged.read(1)
            damaged.seek(0)
            damaged.write(bytes([byte[0] ^ 1]))


def full_cache(play: Play, fault: Fault) -> None:
    host = _chosen(list(play.hosts.values()), fault)
    play.hit_host(host, f"has its cache full for {fault.lasts:g} s")
    play.disk.full.add(f"{host.root}/cache")
    play.world.after(fault.lasts, lambda: play.disk.full.discard(f"{host.root}/cache"))


def no_streams(play: Play, fault: Fault) -> None:
    host = _chosen(list(play.hosts.values()), fault)
    play.hit_host(host, f"takes no streams for {fault.lasts:g} s")
    host.takes_streams = False
    play.world.after(fault.lasts, lambda: setattr(host, "takes_streams", True))


def broken_bucket(play: Play, fault: Fault) -> None:
    play.world.say(f"the bucket is broken for {fault.lasts:g} s")
    play.bucket.is_broken = True
    play.world.after(fault.lasts, lambda: setattr(play.bucket, "is_broken", False))


def slow_bucket(play: Play, fault: Fault) -> None:
    play.world.say(f"the bucket is slow for {fault.lasts:g} s")
    play.bucket.slow_s = 2.0
    play.world.after(fault.lasts, lambda: setattr(play.bucket, "slow_s", 0.0))


def flip_bucket(play: Play, fault: Fault) -> None:
    if path := play.bucket.flip(fault.target, play.flipped):
        play.world.say(f"a bit of {path} flips")
        play.flipped[Path(path)] = play.world.now


# -- fit(), and the people around it ---------------------------------------------------------------------------------


def kill_coordinator(play: Play, fault: Fault) -> None:
    if play.lives[-1].process.is_alive:
        play.world.say("fit() is killed")
        _kill_fit(play, fault)


def lose_power(play: Play, fault: Fault) -> None:
    """All machines go out at once, and the one with the storage forgets what it has not flushed."""
    if play.lives[-1].process.is_alive:
        play.world.say("the power fails")
        _kill_fit(play, fault)
        for host in play.hosts.values():
            host.die()
            host.is_up = True
        for text in play.disk.lose_power():
            play.world.say(text)


def _kill_fit(play: Play, fault: Fault) -> None:
    """Kill the process that calls fit(), and start it again later."""
    life = play.lives[-1]
    life.was_killed = True
    life.process.kill()
    play.world.after(fault.lasts, play.begin_again)


def stop_coordinator(play: Play, fault: Fault) -> None:
    process = play.lives[-1].process
    if process.is_alive and not process.is_stopped:
        play.world.say(f"fit() is stopped for {fault.lasts:g} s")
        process.stop()
        play.world.after(fault.lasts, process.resume)


def take_over(play: Play, fault: Fault) -> None:
    """Somebody suspends fit() and its children, and starts the run on another machine."""
    life = play.lives[-1]
    if play.scenario.bucket and life.facts and life.process.is_alive and not life.process.is_stopped:
        play.world.say("fit() and its children are stopped")
        life.was_killed = True
        family = [life.process, *(one for one in play.world.processes if one.name.endswith(f" of {life.process.name}"))]
        for process in family:
            process.stop()
        play.world.after(fault.lasts, lambda: play.begin_again(play.elsewhere))
        back = fault.lasts + play.world.random.choice([1, 30, 90])
        for process in family:
            play.world.after(back, process.resume)


def signal(play: Play, fault: Fault) -> None:
    life = play.lives[-1]
    loop = getattr(life.process, "loop", None)
    if life.process.is_alive and loop is not None:
        number = (15, 15, 2)[fault.target % 3]
        _note_stop(life, play)
        play.world.say(f"signal {number}")
        loop.post(lambda: loop.on_signal(number))


def signal_twice(play: Play, fault: Fault) -> None:
    signal(play, fault)
    play.world.after(play.world.random.choice([0, 0.1, 1, 5]), lambda: signal(play, fault))


def _note_stop(life: Life, play: Play) -> None:
    life.asked_to_stop += 1
    life.stops_at = min(life.stops_at, play.world.now)


def request(play: Play, fault: Fault) -> None:
    """Somebody calls distrain stacks, stop or profile."""
    what = ("stacks", "profile", "profile", "stacks", requests.STOP)[fault.target % 5]
    if _ask(play, what, rank=9 * (fault.target % 5 == 2), seconds=1.0) and what == requests.STOP:
        _note_stop(play.lives[-1], play)


def debug(play: Play, fault: Fault) -> None:
    """Somebody stops a rank with distrain debug, and looks around."""
    if (rank := _chosen(play.ranks(), fault)) is not None:
        looks_s = fault.lasts + play.world.random.choice([0, 90])
        if channel := _ask(play, requests.DEBUG, rank=rank.number):
            Person(play, play.lives[-1], rank.number, channel, looks_s, leaves=fault.target % 3 == 0).begin()


def _ask(play: Play, what: str, **fields: Any) -> Channel | None:
    """Send a request to the coordinator, if there is one."""
    life = play.lives[-1]
    loop = getattr(life.process, "loop", None)
    paths = getattr(life.engine, "store", None) and life.engine.store.paths
    if not life.process.is_alive or loop is None or not paths.requests.exists():
        return None
    try:
        channel = requests.connect(paths)
    except ConnectionRefusedError:  # the socket is that of a process that was killed
        return None
    life.process.at_death.append(partial(_hang_up, loop))
    play.world.say(f"distrain {what} {fields}")
    channel.send(wire.Ask(attempt=0, **fields, what=what))
    for moment_s in (0.0, 0.001):  # it accepts the connection, and then reads
        play.world.after(moment_s, loop.look)
    if what != requests.DEBUG:
        play.asked.append((life, play.world.now, channel))
    return channel


def _hang_up(loop: Any) -> None:
    """Close the connections of a process that has died, as the kernel does."""
    for fd in [fd for fd in loop._watched if stat.S_ISSOCK(os.fstat(fd).st_mode)]:
        with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                del loop._watched[fd]
                os.close(fd)


def second_start(play: Play, fault: Fault) -> None:
    """Somebody runs the same command again, while the first one runs."""
    if play.lives[-1].process.is_alive:
        play.world.say("the same command again")
        play.begin_life(is_rival=True)


def clock_jump(play: Play, fault: Fault) -> None:
    play.world.clock_error_s += (-3600.0, -30.0, 30.0, 3600.0)[fault.target % 4]
    play.world.say(f"the clock is {play.world.clock_error_s:+g} s ahead")


def _chosen(candidates: Sequence[Any], fault: Fault) -> Any:
    return candidates[fault.target % len(candidates)] if candidates else None


def _lines(play: Play, host: Host) -> list[Line]:
    links = play.lives[-1].ranks._links if play.lives[-1].ranks is not None else {}
    return [host.agent.up, *([links[host.name].down] if host.name in links else [])]


STRIKES: dict[str, Callable[[Play, Fault], None]] = {
    strike.__name__.replace("_", " "): strike
    for strike in (
        kill_rank, stop_rank, kill_host, late_host, sick_host, flaky_host, kill_agent, kill_forkserver, kill_child,
        stop_agent, slow_link, cut_link,
        full_disk, broken_disk, read_only_disk, slow_disk, full_memory, flip_memory, flip_disk, kill_coordinator,
        full_cache, no_streams, no_peers, broken_bucket, slow_bucket, flip_bucket,
        lose_power, stop_coordinator, take_over, signal, signal_twice, request, debug, second_start, clock_jump,
    )
}  # fmt: skip
