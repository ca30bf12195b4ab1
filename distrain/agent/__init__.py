"""One host: the agent that supervises it, the forkserver that starts its workers, the guard that outlives both.

None of them imports torch, except the forkserver for its workers. Runs in: agent, forkserver, guard.
"""
