"""torchsnapshot: Snapshot.take, and Snapshot.async_take with a thread that writes.

The documents call Snapshot.take(path, app_state), where each value of app_state is stateful, and
restore into such a value. On return of take the bytes lie in the page cache; async_take returns
when the state has been copied, as far as a budget of memory allows, and its wait() when written.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torchsnapshot==0.1.0"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import Save, State, nothing
from rivals.peer import Peer, fsync_tree


class TorchSnapshot(Peer):
    """torchsnapshot Snapshot.take."""

    name = "torchsnapshot"
    contract = "sync; page cache on return, harness fsyncs"
    fills_template = True
    modules = ("torchsnapshot",)

    def save(self, state: State, target: Path) -> Save:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(target / "snapshot"), {"state": StateDict(**state)})
        return Save(nothing, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        from torchsnapshot import Snapshot, StateDict

        state = StateDict(**template)
        Snapshot(str(target / "snapshot")).restore({"state": state})
        return dict(state)


class TorchSnapshotAsync(TorchSnapshot):
    """torchsnapshot Snapshot.async_take."""

    name = "torchsnapshot-async"
    contract = "background thread; returns when the state is staged within its memory budget"
    background = True

    def save(self, state: State, target: Path) -> Save:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(target / "snapshot"), {"state": StateDict(**state)})
        return Save(nothing, lambda: (pending.wait(), fsync_tree(target)))
