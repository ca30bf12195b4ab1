"""The protocol between the processes of a run: the messages, and the frames that carry them.

``wire.Reported`` and ``wire.encode()`` can be used without naming the modules. Runs in: every process.
"""

from distrain.wire.codec import *
from distrain.wire.messages import *
