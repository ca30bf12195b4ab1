"""Python runs this first in each process of a drilled command. Runs in: worker, launcher."""

import sys

try:
    from distrain.drilling.command import arm
except ImportError as error:
    print(f"distrain drill: {sys.executable} cannot import distrain ({error}): install it there", file=sys.stderr)
else:
    arm()
