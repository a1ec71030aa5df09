"""One process of a benchmark: executes requests that arrive through a socket. Started by `flockstep.bench.turns`."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from flockstep.bench.ways import BenchProcess, Party, Way


def main(arguments: list[str]) -> None:
    """Arguments: module of implementations, socket, number of processes, bytes of the largest array.

    The last argument is the rank, if MPI does not know it.
    """
    catalog, address, workers, largest, *given = arguments
    rank = int(given[0]) if given else _rank_in_mpi()
    place = BenchProcess(rank, int(workers), Path(address).parent, "", int(largest))
    ways: dict[str, Way] = {way.name: way for way in importlib.import_module(catalog).WAYS}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    parties: dict[str, Party] = {}
    with connection.makefile("rw", encoding="utf-8") as file:
        _say(file, {"rank": rank})
        for line in file:
            try:
                answer = {"answer": _obey(json.loads(line), ways, parties, place)}
            except Exception as error:  # noqa: BLE001 - reported to the process that asked
                answer = {"failed": "".join(traceback.format_exception_only(error)).strip()}
            _say(file, answer)
        for party in parties.values():
            party.close()


def _obey(command: dict[str, Any], ways: dict[str, Way], parties: dict[str, Party], place: BenchProcess) -> Any:
    name = command["way"]
    if command["do"] == "open":
        parties[name] = ways[name].party(replace(place, segment=command["segment"]))
        return parties[name].told
    if command["do"] == "connect":
        parties[name].connect(command["told"])
        return None
    return parties[name].run(command["size"], command["calls"])


def _say(file: Any, what: dict[str, Any]) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def _rank_in_mpi() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    main(sys.argv[1:])
