"""What the tests start as Python: hands its descriptors to the server of forked_python.py, which forks a process that does
the work; passes signals on to it, and ends as it has ended. Where the server refuses, it becomes the real Python.

Arguments: the server's socket, then those of Python. Imports little, so that it starts in 20 ms.
"""

import os
import select
import signal
import socket
import sys

FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM", "SIGABRT")


def inherited() -> list[int]:
    """Descriptors that whoever started this process has left open for it; its own are not inheritable."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (pathlib takes as long to import as all the others)
        try:  # noqa: SIM105
            numbers += [int(name)] if os.get_inheritable(int(name)) else []
        except OSError:  # that of the folder itself
            pass
    return numbers


def main() -> None:
    descriptors = inherited()
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    socket.send_fds(server, [" ".join(map(str, descriptors)).encode() + b"\n"], descriptors)
    if server.recv(1) != b"f":
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    server.setblocking(False)
    signal.set_wakeup_fd(server.fileno())  # their numbers go to the server
    for name in FORWARDED:
        signal.signal(getattr(signal, name), lambda *_: None)
    for number in descriptors:
        os.close(number)
    select.select([server], [], [])
    code = int.from_bytes(server.recv(4), "little", signed=True)
    if code < 0:
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
