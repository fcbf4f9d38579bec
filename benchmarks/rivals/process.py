"""A process of a peer's own, run by the interpreter of its rival's environment.

One measurement is one process: it gets a function and a peer over a pipe, runs that function (which
makes the state, saves, loads and takes the clocks), answers with a row and ends. So no peer
inherits threads, memory or a crash of another, and only one at a time holds a state, for all of
them would not fit. What a process pays for once falls into saves that the function does not time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rivals.environment import file_of, interpreter
from rivals.peer import Peer

BENCHMARKS = Path(__file__).resolve().parents[1]
ANSWER_S = 1800
END_S = 60


class Failed(Exception):
    """What went wrong in a process; the text begins with the name of the error there."""


def reason_of(error: BaseException) -> str:
    """Return an error in one line."""
    text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]


def in_process_of(peer: Peer, function: Callable[..., Any], *arguments: object) -> Any:
    """Return what `function(peer, *arguments)` returns in a new process of that peer.

    Raises:
        Failed: it raised something there, or the process died, or did not end.
        RuntimeError: the environment of its rival could not be made.
    """
    return in_process(interpreter(file_of(type(peer))), function, peer, *arguments)


def in_process(python: Path, function: Callable[..., Any], *arguments: object) -> Any:
    """Return what `function(*arguments)` returns in a new process of that interpreter.

    Raises:
        Failed: see in_process_of.
    """
    ours, theirs = multiprocessing.Pipe()
    process = subprocess.Popen(
        [python, "-m", "rivals.process", str(theirs.fileno())],
        env=os.environ | search_paths(python),
        pass_fds=[theirs.fileno()],
        stdout=sys.stderr,  # some rivals log to stdout; that is for the result alone
        start_new_session=True,
    )
    theirs.close()
    try:
        ours.send((function, arguments))
        if not ours.poll(ANSWER_S):
            raise Failed(f"TimeoutError: no answer within {ANSWER_S} s")
        error, result = ours.recv()
        if error is not None:
            raise Failed(error)
        if status := process.wait(END_S):
            raise Failed(f"ChildProcessError: it answered, then ended with status {status}")
        return result
    except subprocess.TimeoutExpired:
        raise Failed(f"TimeoutError: it answered, but did not end within {END_S} s") from None
    except (EOFError, ConnectionError):
        raise Failed(f"ChildProcessError: it {end_of(process)}, no answer") from None
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):  # nobody is left: as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of(process: subprocess.Popen[bytes]) -> str:
    """Return in words how a process ended that talks no more."""
    try:
        return f"ended with status {process.wait(END_S)}"
    except subprocess.TimeoutExpired:  # a thread of the rival's keeps it, say
        return f"did not end within {END_S} s"


def search_paths(python: Path) -> dict[str, str]:
    """Return where the process finds the modules of the benchmark, and the tools of both venvs."""
    tools = [str(python.parent), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    modules = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PATH": os.pathsep.join(tools), "PYTHONPATH": os.pathsep.join(modules)}


def main() -> None:
    """Answer one call, which comes over the pipe whose descriptor the command line names."""
    # An installed fastckpt comes first; the tree serves when the extension was built in place.
    sys.path.append(str(BENCHMARKS.parent))
    # Some rivals hold a file open for each tensor.
    _soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Closed in any case, which tells the driver: a thread of the rival's may keep this process.
    with Connection(int(sys.argv[1])) as connection:
        function, arguments = connection.recv()
        try:
            answer = (None, function(*arguments))
        except BaseException as error:  # of any kind: torch's CheckpointException is no Exception
            answer = (reason_of(error), None)
        connection.send(answer)


if __name__ == "__main__":
    main()
