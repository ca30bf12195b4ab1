"""``distrain board``: all runs of a storage path in the browser, live.

``runs`` makes rows of the files of the run directories, ``server`` shows them at 127.0.0.1, ``board.js`` draws them.

Runs in: the process of the command.
"""
