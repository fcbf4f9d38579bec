"""`fastckpt repair`: lists the remains of dead saves in a directory, and with --yes removes them.

It never touches a committed step or checkpoint.
"""

from __future__ import annotations

import argparse
import json

from fastckpt.arguments.quantities import shown_size, shown_time
from fastckpt.cli.local_tiers import tiers_of
from fastckpt.cli.shared_arguments import is_there, real_root, shown_name
from fastckpt.lazy.kind import Debris, Place
from fastckpt.lazy.kinds import debris_at
from fastckpt.saving import pipeline
from fastckpt.saving.lease import Lease
from fastckpt.storage.file_system import reported


def run(arguments: argparse.Namespace) -> int:
    storage, directory = pipeline.current().storage, real_root(arguments.directory)
    tiers = [steps.root for steps in tiers_of(storage, directory, arguments.local)]
    # The root is missing if all steps are still in memory.
    roots = [*filter(is_there, (directory, *tiers))] or [directory]
    if arguments.takeover:
        for root in roots:
            Lease(storage, root).take_over()
            if not arguments.json:
                print(
                    f"{shown_name(root)} is released to the next job that saves there. If "
                    "another job is alive, its next save there fails"
                )
    debris = list[Debris]()
    for root in roots:
        with reported("list", root):
            debris += debris_at(Place(storage, pipeline.current().staging, root))
    rows = []
    for each in debris:
        may_go = arguments.yes and (each.is_dead or arguments.other_hosts)
        entry = each._asdict() | {"removed": may_go and each.remove()}
        del entry["remove"]
        rows.append(entry)
        if not arguments.json:
            state = ", removed" if entry["removed"] else ", not removed" if arguments.yes else ""
            if not (each.is_dead or arguments.other_hosts):
                state += "; this host cannot detect whether its save is alive: see --other-hosts"
            facts = f"{shown_size(each.nbytes)}, changed {shown_time(each.age_s)} ago"
            print(f"{shown_name(each.path)}: {shown_name(each.what)}, {facts}{state}")
    if arguments.json:
        print(
            json.dumps(
                {"directory": directory, "taken_over": arguments.takeover, "debris": rows}, indent=1
            )
        )
    elif not debris:
        print(f"nothing to repair in {shown_name(directory)}")
    return int(not all(row["removed"] for row in rows))
