"""Hostfiles and lists such as ``a:4,b:4``: every accepted form, and every error with its file and line."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.errors import HostfileError
from distrain.hosts.hostfile import HostSpec, parse_hostfile, parse_hosts


def only(line: str) -> HostSpec:
    [host] = parse_hostfile(line, "H")
    return host


# -- what is understood ----------------------------------------------------------------------------------------------


def test_a_hostfile_of_deepspeed_or_openmpi_is_one_of_ours() -> None:
    text = "# my machines\n\nworker-1 slots=4\n  worker-2\tslots=8   # the large one\r\n#worker-3 slots=4\n"
    hosts = parse_hostfile(text, "H")
    assert [(host.name, host.address, host.slots) for host in hosts] == [
        ("worker-1", "worker-1", 4),
        ("worker-2", "worker-2", 8),
    ]


@pytest.mark.parametrize(
    ("word", "name", "user", "address", "port"),
    [
        ("gpu1:2222", "gpu1:2222", None, "gpu1", 2222),
        ("[fd77::11]", "[fd77::11]", None, "fd77::11", None),
        ("alice@[FD77:0::11]:22", "[fd77::11]:22", "alice", "fd77::11", 22),
        ("[fe80::1%eth0]", "[fe80::1%eth0]", None, "fe80::1%eth0", None),
    ],
)
def test_users_ports_and_ipv6(word: str, name: str, user: str | None, address: str, port: int | None) -> None:
    host = only(word)
    assert (host.name, host.user, host.address, host.port) == (name, user, address, port)
    assert not host.is_local


@pytest.mark.parametrize("name", ["gpu_1", "my+alias", "büro-3", "2a", "a%b", "node-07.rack.lan."])
def test_names_of_an_ssh_configuration_are_understood(name: str) -> None:
    assert only(name).address == name


def test_localhost_is_this_machine_unless_it_has_a_user_or_a_port() -> None:
    assert only("localhost slots=2").is_local
    assert not only("localhost:2222").is_local
    assert not only("alice@localhost").is_local
    assert not only("127.0.0.1").is_local


def test_a_host_without_slots_takes_one_rank_or_one_for_each_of_its_gpus() -> None:
    assert only("a").slots == 1
    assert only("a gpus=0,2,5").slots == 3
    assert only("a gpus=0,2 slots=4").slots == 4
    assert only("a gpus=GPU-8a1b,GPU-77").gpus == ("GPU-8a1b", "GPU-77")
    assert only("a gpus=MIG-77/1/0").gpus == ("MIG-77/1/0",)


def test_what_is_to_know_about_a_host() -> None:
    host = only(
        """a slots=2 python=/opt/py/bin/python cwd="/data/my project" env.A=1 env.B='it is # "x"' env.C=x=y env.D="""
    )
    assert (host.python, host.cwd) == ("/opt/py/bin/python", "/data/my project")
    assert (host.rack, only("a rack=r12").rack) == ("", "r12")
    assert host.environment == {"A": "1", "B": 'it is # "x"', "C": "x=y", "D": ""}


@given(st.text(st.characters(exclude_categories=("C", "Z"))))
def test_any_printable_value_can_be_quoted(value: str) -> None:
    assert only(f"a slots=1 env.X={shlex.quote(value)} # comment").environment == {"X": value}


@pytest.mark.parametrize("text", ["a:4,b:2", " a:4 , b:2 "])
def test_hosts_of_the_command_line_have_slots_behind_the_colon(text: str) -> None:
    assert [(host.name, host.slots, host.port) for host in parse_hosts(text, "--hosts")] == [
        ("a", 4, None),
        ("b", 2, None),
    ]


def test_hosts_may_be_a_list_with_users_and_ipv6() -> None:
    hosts = parse_hosts(["alice@a:4", "[fd77::11]:2", "localhost"], "hosts")
    assert [(host.user, host.address, host.slots) for host in hosts] == [
        ("alice", "a", 4),
        (None, "fd77::11", 2),
        (None, "localhost", 1),
    ]
    assert hosts[2].is_local


# -- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a slots=0", "slots=0: must be a whole number of at least 1; leave a host out"),
        ("a slots=four", "slots=four: must be"),
        ("a slots=1 slots=2", "a key is given twice"),
        ("a slot=4", "unknown key 'slot'; known are slots=, gpus=, python=, cwd=, transport=, rack= and env.NAME="),
        ("a 4", "'4' is not of the form key=value"),
        ("slots=4", "'slots=4' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("a:ssh", "'a:ssh' is not a host"),
        ("a:0", "port 0: must be between 1 and 65535"),
        ("fd77::11", "'fd77::11' is not a host: must be host, user@host, host:number or [IPv6 address]"),
        ("[fd77::xyz]", "[fd77::xyz] is not an IPv6 address"),
        ("a gpus=0,0", "gpus=0,0: a GPU is named twice"),
        ("a gpus=0,GPU-8a1b", "gpus=0,GPU-8a1b: must be all indices, or all GPU-..."),
        ("a gpus=MIG-1,MIG-2", "gpus=MIG-1,MIG-2: CUDA shows a process one MIG instance only"),
        ("a gpus=first", "gpus=first: must be indices or UUIDs such as 0,2"),
        ("a python=python3", "python=python3: must be an absolute path on that host"),
        ("a cwd=~/x", "cwd=~/x: must be an absolute path"),
        ("a env.=1", "env.: not a name of an environment variable"),
        ("a env.CUDA_VISIBLE_DEVICES=0,1", "write gpus=0,1 instead, so that distrain can count them"),
        ("a env.RANK=3", "env.RANK: each rank is given its own RANK; leave it out"),
        ("a env.X=1\0 slots=2", "this line contains a NUL byte"),
        ("a cwd='/x", "a quote or a backslash is not closed: a cwd='/x"),
        ("a slots=4 \\", "a quote or a backslash is not closed: a slots=4 \\"),
        ("alpha,beta slots=4", "'alpha,beta' is not a host: must be host, user@host, host:number or [IPv6 address]"),
        ("hosts/alpha", "'hosts/alpha' is not a host"),
        ("first slots=2", "first is already named in line 1"),
        ("alice@first", "first is already named in line 1"),
    ],
)
def test_an_error_names_file_line_and_cause(line: str, why: str) -> None:
    with pytest.raises(HostfileError, match=re.escape(why)) as raised:
        parse_hostfile(f"first\n\n{line}\n", "my/hosts")
    assert str(raised.value).startswith("my/hosts:3: ")


@pytest.mark.parametrize("text", ["", "\n# nobody\n"])
def test_a_hostfile_without_a_host_is_an_error(text: str) -> None:
    with pytest.raises(HostfileError, match=r"^H: there is no host in it"):
        parse_hostfile(text, "H")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a:0", "'a:0': slots=0: must be"),
        ("a:4,a:2", "'a:2': named twice"),
        ("a slots=4", "--hosts: 'a slots=4' is not a host; must be host:slots or [IPv6 address]:slots, such as"),
        ("a:4:2", "--hosts: 'a:4:2' is not a host; must be host:slots"),
        ("fd77::11", "'fd77::11' is not a host; must be host:slots or [IPv6 address]:slots, such as"),
        ("", "is not a host"),
        ("a:2222", "'a:2222': 2222 would be the number of slots; must be host:slots"),
    ],
)
def test_an_error_of_the_command_line_names_the_part(text: str, why: str) -> None:
    with pytest.raises(HostfileError, match=re.escape(why)) as raised:
        parse_hosts(text, "--hosts")
    assert str(raised.value).startswith("--hosts: ")
    assert "such as alpha:4,beta:4; the port of ssh belongs in ~/.ssh/config, or in a hostfile: " in str(raised.value)
