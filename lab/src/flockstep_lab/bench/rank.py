"""One process of a benchmark, started by `flockstep_lab.bench.interleaved`: executes requests that arrive through a
socket.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from flockstep_lab.bench.implementation import BenchProcess, BenchWorker, Implementation


def main(arguments: list[str]) -> None:
    """Run the process. The command-line arguments are the module of implementations, the path of a socket, the number
    of processes, and the size of the largest array in bytes.

    A last argument is the rank, which is absent if MPI assigns the rank.
    """
    catalog, address, workers, largest, *given = arguments
    rank = int(given[0]) if given else _rank_in_mpi()
    place = BenchProcess(rank, int(workers), Path(address).parent, "", int(largest))
    implementations: dict[str, Implementation] = {
        implementation.name: implementation for implementation in importlib.import_module(catalog).IMPLEMENTATIONS
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    workers_by_name: dict[str, BenchWorker] = {}
    with connection.makefile("rw", encoding="utf-8") as file:
        _write(file, {"rank": rank})
        for line in file:
            try:
                answer = {"answer": _execute(json.loads(line), implementations, workers_by_name, place)}
            except Exception as error:  # noqa: BLE001 - reported to the process that asked
                answer = {"failed": "".join(traceback.format_exception_only(error)).strip()}
            _write(file, answer)
        for worker in workers_by_name.values():
            worker.close()


def _execute(
    command: dict[str, Any],
    implementations: dict[str, Implementation],
    workers_by_name: dict[str, BenchWorker],
    place: BenchProcess,
) -> Any:
    name = command["implementation"]
    if command["do"] == "open":
        opened = replace(place, segment=command["segment"], secret=bytes.fromhex(command["secret"]))
        workers_by_name[name] = implementations[name].worker(opened)
        return workers_by_name[name].address
    if command["do"] == "connect":
        workers_by_name[name].connect(command["addresses"])
        return None
    return workers_by_name[name].run(command["size"], command["calls"])


def _write(file: Any, what: dict[str, Any]) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def _rank_in_mpi() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    main(sys.argv[1:])
