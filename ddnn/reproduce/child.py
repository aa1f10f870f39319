"""`python -m ddnn.reproduce.child PARENT MODULE ...` is `python -m MODULE ...`, which ends when its parent is killed.

The kernel tells it so, since after a kill -9 nothing runs in the parent. The child asks the kernel itself, and not
between fork and exec, where hardly anything is safe in a parent that has threads.
"""

from __future__ import annotations

import runpy
import signal
import sys

from ddnn.parallel.mpirun import ends_with_parent


def main(parent: int, module: str, *arguments: str) -> None:
    """Runs the module as a program; SIGUSR1 ends it where process `parent` dies, or has died before this.

    To a training that signal is never the second one, which would end it without the checkpoint it is at.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the parent may have been told to ignore it
    ends_with_parent(signal.SIGUSR1, parent)()
    sys.argv = [module, *arguments]  # the module's file takes the first's place
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
