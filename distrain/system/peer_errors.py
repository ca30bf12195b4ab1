"""The words of errors that mean that another rank is gone. Pure. Runs in: worker, coordinator."""

from __future__ import annotations

import re

# The errors of ranks whose peer is gone, from gloo, NCCL and the TCPStore (torch 2.4 to 2.15), TensorFlow (2.21)
# and JAX (0.10), whose collectives are gloo's and NCCL's.
_PEER_GONE = re.compile(
    r"collective operation timeout|failed to pass monitoredbarrier|ncclremoteerror|dump signal from another rank|"
    r"collective ops is aborted by|tasks are unhealthy \(stopped sending heartbeats\)|"
    r"the jax distributed service detected fatal errors|cannot be read on host",
    re.IGNORECASE,
)
"""Only communication between ranks fails with these words, or between their hosts (agent/memory_keeper.py)."""
CONNECTION_GONE = re.compile(
    r"connection (was )?(likely )?(closed|reset|aborted)|closed by (remote )?peer|broken pipe|socket closed|"
    r"timed out|timeouterror|wait timeout|socket timeout|failed to recv|recvvalue failed|sendbytes failed|"
    r"remote process exited|remote error detected",
    re.IGNORECASE,
)
"""Any connection may fail with these words: to another rank, to a storage, to a child process."""
_BETWEEN_RANKS = re.compile(r"\bgloo\b|\bnccl\b|c10d|tcpstore|remote target /job:|coordination ?service", re.IGNORECASE)
"""Names of what connects ranks."""


def blames_peer(text: str, *, between_ranks: bool = False) -> bool:
    """Tell if the text of an error means that another rank is gone.

    between_ranks: the error is known to come from the communication between ranks.
    """
    if _PEER_GONE.search(text):
        return True
    return bool(CONNECTION_GONE.search(text) and (between_ranks or _BETWEEN_RANKS.search(text)))
