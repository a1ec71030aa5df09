"""How soon real runs notice faults and continue, for the table of faults in docs/explanation/failures.md.

    python benchmarks/faults.py [WORD …]   a line for each fault, or for those whose name holds one of the words
    python benchmarks/faults.py --write    also write the figures to benchmarks/faults.json, for docs/generate.py

Faults of processes hit a run of `softmax` on two workers in its middle; times are seconds between the signal and what
follows, medians of three runs. Faults of links hit runs whose connections go through a proxy. Strangers meet a
coordinator in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from flockstep import registry
from flockstep.codecs.base import Codec
from flockstep.errors import ProtocolError
from flockstep.launchers.host_messages import HostLinks, Join, unpacked
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.meeting import Meeting
from flockstep.links.addresses import tcp_address
from flockstep.links.handshake import Handshake
from flockstep.links.wire import MAX_HEADER, SenderIdentity, decode, encode
from flockstep.messages import LAUNCHER, Message
from flockstep.records.events import Event, PromotedEvent, RefusedEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import DisruptedRun, Disruption, Expected, Failpoint, Setting
from flockstep_lab.chaos.failpoint import write_failpoint
from flockstep_lab.chaos.run import COMMAND, ChaosRun
from support.disks import fill, small_disk
from support.hosts import PORT, SECRET, Ended, network
from support.jobs import go_on, paced

FIGURES = Path(__file__).with_suffix(".json")
FAULTY_TCP = Path(__file__).parents[1] / "tests" / "support" / "faulty_tcp.py"
WALL_CLOCK = FAULTY_TCP.with_name("wall_clock.c")

RUNS = 3
STEPS = 3000
HEARTBEAT = 2.0


@dataclass(frozen=True)
class Measured(Disruption):
    """Signals a process of the run when each worker has taken a third of its steps, and measures what follows."""

    noun: ClassVar[str] = "disruption"
    who: str = "worker-1"
    kind: signal.Signals = signal.SIGKILL
    until: Callable[[ChaosRun], bool] = lambda run: False
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def drawn(cls, random: object, setting: Setting) -> None:
        """Draw nothing, because a measurement chooses its own disruption."""

    def expected(self, setting: Setting) -> Expected:
        return Expected()

    def act(self, run: DisruptedRun) -> None:
        """Send the signal; measure the seconds until `until` is true."""
        assert isinstance(run, ChaosRun)
        run.wait(lambda: min(map(run.steps, range(run.setting.workers))) >= run.setting.steps // 3)
        pid = run.pid if self.who == "launcher" else run.process_of(self.who)
        assert pid is not None, run.err
        began = time.monotonic()
        run.send(self.kind, pid)
        while not self.until(run) and time.monotonic() < began + 60:
            time.sleep(0.001)
        self.seconds.append(time.monotonic() - began)


def says(text: str) -> Callable[[ChaosRun], bool]:
    """Whether the command has written a text."""
    return lambda run: text in run.err


def ends(run: ChaosRun) -> bool:
    """Whether no process of the run is left."""
    return not run.processes()


def measure(strategy: str, disruption: Measured) -> tuple[list[float], list[Event]]:
    """Disrupt `RUNS` runs; return the seconds, and the events of all runs that have a record."""
    events: list[Event] = []
    for number in range(RUNS):
        setting = Setting("softmax", Strategy.parse(strategy), 2, STEPS, number, HEARTBEAT)
        with tempfile.TemporaryDirectory() as place, ChaosRun(setting, Path(place) / "run", disruption) as run:
            run.begin()
            events += RunFolder(run.folder).read_events() if run.summary is not None else []
    return disruption.seconds, events


def text(seconds: list[float]) -> str:
    """The median of seconds, and their range."""
    middle, digits = statistics.median(seconds), 3 if max(seconds) < 0.1 else 2
    return f"{middle:.{digits}f} s ({min(seconds):.{digits}f} to {max(seconds):.{digits}f} s)"


def killed_worker() -> str:
    kill = Measured(until=says("worker 1 was killed by SIGKILL"))
    return f"the run said so after {text(measure('asgd', kill)[0])}, and the others continued (`asgd`)"


def stopped_worker() -> str:
    stop = Measured(kind=signal.SIGSTOP, until=says("has not answered for 2 s"))
    return f"noticed after {text(measure('asgd', stop)[0])} with a heartbeat of 2 s (`asgd`)"


def killed_server() -> str:
    server = Measured(who="server-0", until=says("continues in its place"))
    seconds, events = measure("ps(consistency=bsp, replicas=1)", server)
    pushes = [one.push_seconds for one in events if isinstance(one, PromotedEvent) and one.push_seconds is not None]
    return (
        f"with a backup: the backup continued after {text(seconds)}, and a push arrived within {text(pushes)} more; no "
        "step was lost (`ps(bsp, replicas=1)`). Without: the steps since the checkpoint were repeated"
    )


def killed_launcher() -> str:
    launcher = Measured(who="launcher", until=ends)
    return f"no process was left after {text(measure('asgd', launcher)[0])} (`asgd`)"


def terminated() -> str:
    term = Measured(who="launcher", kind=signal.SIGTERM, until=lambda run: not run.going)
    seconds, _ = measure("all_reduce", term)
    return f"the command had ended {text(seconds)} after SIGTERM, with a checkpoint (`all_reduce`)"


def link(fault: str, encrypt: bool) -> Callable[[], str]:
    """A fault of the links between three workers, about as often as there are links."""

    def measured() -> str:
        away: list[float] = []
        fired = 0
        for seed in range(RUNS):
            with tempfile.TemporaryDirectory() as place:
                log = Path(place) / "faults"
                options = f"faults={fault!r}, seed={seed}, every=20000, encrypt={str(encrypt).lower()}, log='{log}'"
                words = ["train", "softmax", "-s", "all_reduce", "-n", "3", "--steps", "300", "--heartbeat", "2"]
                words += ["--transport", f"faulty_tcp({options})", "--import", FAULTY_TCP, "--out", f"{place}/run"]
                done = subprocess.run([*COMMAND, *map(str, words)], check=True, capture_output=True, text=True)
                away += map(float, re.findall(r"is connected to worker \d again after ([0-9.]+) s", done.stderr))
                fired += len(log.read_text().splitlines())
        when = f"connected again within {max(away) + 0.1:.1f} s after a fault was noticed"
        return f"{when}; no step was lost ({fired} faults, heartbeat 2 s)"

    return measured


def cut(one_way: bool) -> Callable[[], str]:
    """The cable of one of two hosts is out for 8 s, or only the packets of that host are lost."""

    def measured() -> str:
        seconds = []
        with network(2) as (one, other), tempfile.TemporaryDirectory() as place:
            where = ["--nodes", "2", "--coordinator", f"{one.address}:{PORT}"]
            words = ["softmax", "-s", "all_reduce", "-n", "2", "--steps", "100000000", "--evaluate-every", "100000"]
            second = other.start("train", *where, "--node-rank", "1", *words)
            with (Path(place) / "err").open("w") as err:
                command = [*COMMAND, "train", *where, "--node-rank", "0", "--out", f"{place}/run", *words]
                first = subprocess.Popen(
                    one.command(*command), stderr=err, env={**os.environ, "FLOCKSTEP_SECRET": SECRET}, text=True
                )
                file = Path(place) / "run/events/worker-1.jsonl"
                wait(lambda: file.exists() and file.stat().st_size > 0)
                for number in range(1, RUNS + 1):
                    other.mute(one) if one_way else other.cut()
                    time.sleep(8)
                    other.unmute(one) if one_way else other.mend()
                    began = time.monotonic()
                    wait(lambda number=number: (Path(place) / "err").read_text().count("connected again") >= number)
                    seconds.append(time.monotonic() - began)
                first.send_signal(signal.SIGINT)
                first.wait()
                Ended.of(second)
        what = "8 s in which only the packets of one host were lost" if one_way else "a cut of 8 s"
        return f"connected again {text(seconds)} after the end of {what}; no step was lost"

    return measured


def wait(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + 120
    while not condition():
        if time.monotonic() > until:
            raise SystemExit("what is measured did not happen within 120 s")
        time.sleep(0.001)


def resumed() -> str:
    """The launcher is killed while it writes the second checkpoint; the run is resumed."""
    seconds, repeated = [], []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            run, kill = place / "run", write_failpoint(place, Failpoint("launcher", "manifest.begun", 2))
            words = ["train", paced(place), "-s", "all_reduce", "-n", "2", "--steps", "120", "--checkpoint-every", "20"]
            subprocess.run([*COMMAND, *words, "--import", kill, "--out", run], check=False, capture_output=True)
            go_on(place)
            file, began, before = run / "events" / "worker-0.jsonl", time.monotonic(), time.time_ns()
            with subprocess.Popen(
                [*COMMAND, "resume", run], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            ) as again:
                wait(lambda file=file, before=before: new_step(file, before))
                seconds.append(time.monotonic() - began)
                again.communicate()
            repeated.append(int(re.findall(r"; (\d+) recorded", RunFolder(run).read_summary().notes[0])[0]))
    return (
        f"`flockstep resume` trained after {text(seconds)}, start of the processes included; "
        f"{statistics.median(repeated):g} steps of both workers were repeated, with a checkpoint every 20 steps"
    )


def new_step(file: Path, since: int) -> bool:
    """Whether a worker has written a step to its events after a time, in nanoseconds of the wall clock."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime_ns > since and b'"step"' in file.read_bytes()
    return False


def bad_gradient() -> str:
    """A worker computes gradients that are not finite."""
    with tempfile.TemporaryDirectory() as place:
        words = ["train", "softmax", "-s", "ps(bsp)", "-n", "2", "--steps", "100", "--on-bad-gradient", "skip"]
        words += ["--fault", "miscomputes(1, 20, 60)", "--out", f"{place}/run"]
        subprocess.run([*COMMAND, *words], check=True, capture_output=True)
        events = RunFolder(Path(place) / "run").read_events()
    refused = [one for one in events if isinstance(one, RefusedEvent)]
    steps = [one for one in events if isinstance(one, StepEvent) and one.rank == 1]
    return (
        f"{len(refused)} of the worker's {len(steps)} gradients were refused, each before it was used; no step was lost"
    )


def joined() -> str:
    """A third worker joins."""
    seconds = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            words = ["train", paced(place), "-s", "all_reduce", "-n", "2", "--steps", "600", "--max-workers", "3"]
            with subprocess.Popen([*COMMAND, *words, "--out", place / "run"], stderr=subprocess.DEVNULL) as run:
                file = place / "run/events/worker-1.jsonl"
                wait(lambda file=file: file.exists() and file.stat().st_size > 0)
                subprocess.run([*COMMAND, "join", place / "run"], check=True, capture_output=True)
                go_on(place)
                run.wait()
            notes = " ".join(RunFolder(place / "run").read_summary().notes)
            seconds.append(float(re.findall(r"no worker trained for ([0-9.]+) s", notes)[0]))
    return f"no worker trained for {text(seconds)} while a third worker joined (softmax); no step was lost"


def full_disk() -> str:
    """The disk is full while a run takes a checkpoint every 20 steps, and has room again later."""
    told, written = [], []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "small", "4m") as disk:
            place = Path(name)
            words = [
                "train",
                paced(place),
                "-s",
                "all_reduce",
                "-n",
                "2",
                "--steps",
                "2000",
                "--checkpoint-every",
                "20",
            ]
            with (place / "err").open("wb") as err:
                run = subprocess.Popen([*COMMAND, *words, "--out", disk / "run"], stderr=err, stdout=err)
            wait(lambda disk=disk: newest_manifest(disk / "run"))
            fill(disk / "filler")
            began = time.monotonic()
            wait(lambda place=place: b"the previous checkpoint is kept" in (place / "err").read_bytes())
            told.append(time.monotonic() - began)
            before = newest_manifest(disk / "run")
            assert before, "no checkpoint was kept"
            (disk / "filler").unlink()
            began = time.monotonic()
            wait(lambda disk=disk, before=before: newest_manifest(disk / "run") > before)
            written.append(time.monotonic() - began)
            go_on(place)
            assert run.wait() == 0, (place / "err").read_text()
            assert RunFolder(disk / "run").read_summary().steps == 2 * 2000
    return (
        f"the run said so after {text(told)} and went on; the next checkpoint was complete {text(written)} after there "
        "was room, with a checkpoint every 20 steps of 10 ms; no step was lost"
    )


def newest_manifest(run: Path) -> str:
    """Name of the newest complete checkpoint of a run; empty if there is none."""
    return max((file.parent.name for file in run.glob("checkpoints/*/manifest.json")), default="")


OTHER_MODEL = """
import multiprocessing
from pathlib import Path
from flockstep.workloads.softmax import Softmax

def job():
    try:
        if multiprocessing.parent_process() is not None:
            Path(__file__).with_name("chosen").touch(exist_ok=False)
            return Softmax(features=19).job(0)
    except FileExistsError:
        pass
    return Softmax().job(0)
"""


def another_shape() -> str:
    """The model of one of two workers has another shape; a message has an array of another length."""
    seconds = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "other.py").write_text(OTHER_MODEL)
            words = ["train", f"{place}/other.py", "-s", "all_reduce", "-n", "2", "--out", f"{place}/run"]
            began = time.monotonic()
            done = subprocess.run([*COMMAND, *words], check=False, capture_output=True, text=True)
            seconds.append(time.monotonic() - began)
            assert "build the same model on every worker" in done.stderr, done.stderr
    mine, theirs = (SenderIdentity("run", address, "0123456789abcdef", 4 << 20) for address in (2, 1))
    header = encode(Message(1, "push", np.zeros(1 << 20, np.float32), number=1), theirs)
    tracemalloc.start()
    began = time.monotonic()
    with contextlib.suppress(ProtocolError):
        decode(header, memoryview(bytes(40)), 1, mine)
        raise AssertionError("a message of another length was taken")
    took, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (
        f"a model of another shape was refused after {text(seconds)}, start of the command included; a message of "
        f"another length {1000 * took:.1f} ms after its arrival, with {peak / 1024:.0f} KiB of memory"
    )


WATCH = """
import time
from pathlib import Path
from flockstep.records import failpoints

FILE, last = Path(__file__).with_name("longest"), [time.monotonic(), 0.0, 0.0]

def look(point):
    if point == "gradient.computed":
        now, ahead = time.monotonic(), time.time() - time.monotonic()
        if abs(ahead - last[2]) > 1000 and last[2]:
            with FILE.open("a") as file:
                file.write(f"{now - last[0]}\\n")
        last[:] = now, now - last[0], ahead

failpoints.hooks.append(look)
"""


def clock_jumps() -> str:
    """The wall clock of all processes of a run is an hour ahead, and then an hour behind."""
    seconds = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            library, clock, jumps = place / "wall_clock.so", place / "clock", place / "longest"
            subprocess.run(
                [str(shutil.which("cc")), "-shared", "-fPIC", "-o", str(library), str(WALL_CLOCK)], check=True
            )
            (place / "watch.py").write_text(WATCH)
            words = ["train", paced(place), "-s", "all_reduce", "-n", "2", "--steps", "2000", "--heartbeat", "3"]
            words += ["--step-timeout", "60", "--import", str(place / "watch.py"), "--out", str(place / "run")]
            own = {**os.environ, "LD_PRELOAD": str(library), "WALL_CLOCK": str(clock)}
            with subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, env=own) as run:
                file = place / "run/events/worker-1.jsonl"
                wait(lambda file=file: new_step(file, 0))
                for number, ahead in enumerate((3600, -3600), 1):
                    (place / "next").write_text(str(ahead))
                    (place / "next").replace(clock)
                    wait(lambda jumps=jumps, n=number: jumps.exists() and len(jumps.read_text().split()) >= 2 * n)
                go_on(place)
                run.communicate()
            assert run.returncode == 0
            seconds += map(float, jumps.read_text().split())
    return (
        f"the step of a jump of one hour ahead or two hours back took {text(seconds)}, as do other steps of 10 ms; "
        "no step was lost"
    )


WITH_THREADS = """
import sys, threading, time
import numpy as np
import flockstep

def train():
    communicator = flockstep.join()
    assert communicator.all_reduce(np.ones(1000)).sum() == 2000

if __name__ == "__main__":
    lock = threading.Lock()

    def busy():
        while True:
            with lock:
                np.ones((50, 50)) @ np.ones((50, 50))

    for _ in range(8):
        threading.Thread(target=busy, daemon=True).start()
    time.sleep(0.2)
    began = time.monotonic()
    flockstep.launch(train, 2, transport="ipc", out=sys.argv[1])
    print(time.monotonic() - began)
"""


def with_threads() -> str:
    """A program with eight busy threads that share a lock trains a function on two workers."""
    seconds = []
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "program.py").write_text(WITH_THREADS)
        for number in range(RUNS):
            command = [sys.executable, f"{place}/program.py", f"{place}/run{number}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            seconds.append(float(done.stdout.split()[-1]))
    return (
        f"{RUNS} of {RUNS} runs of `flockstep.launch`, from a program with eight busy threads that share a lock, "
        f"finished after {text(seconds)}"
    )


def in_use() -> str:
    """A second run in the folder of a run that is going on."""
    seconds = []
    with tempfile.TemporaryDirectory() as place:
        words = [*COMMAND, "train", "softmax", "-s", "asgd", "-n", "1", "--steps", "100000000", "--out", f"{place}/run"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            wait(lambda: any(Path(place).glob("run/events/worker-0.jsonl")))
            for _ in range(RUNS):
                began = time.monotonic()
                assert subprocess.run(words, check=False, capture_output=True).returncode == 2
                seconds.append(time.monotonic() - began)
            run.send_signal(signal.SIGINT)
    return f"refused after {text(seconds)}, start of the command included"


JOIN = Join(1, 2, 4, (2, 3), {}, name="there")


@contextlib.contextmanager
def coordinator(heartbeat: float = 5.0) -> Iterator[tuple[str, int]]:
    """A coordinator that waits for a host, in a thread; its address."""
    meeting = Meeting("127.0.0.1", 0, SECRET.encode())
    expected = ExpectedHosts(range(1, 2), {1: range(2, 4)}, 4, {})
    with OtherHosts(meeting, expected, "", heartbeat, say=lambda text: None) as hosts:
        over = threading.Event()

        def pump() -> None:
            while not over.wait(0.001):
                hosts.pump()

        thread = threading.Thread(target=pump)
        thread.start()
        try:
            yield "127.0.0.1", hosts.port
        finally:
            over.set()
            thread.join()


def connected(address: tuple[str, int]) -> HostLinks:
    """The links of an agent that has proved that it knows the secret."""
    links = HostLinks(SECRET.encode(), 5.0, 60.0)
    links.bus.connect({LAUNCHER: tcp_address(*address)})
    while not links.bus.reachable(LAUNCHER):
        links.receive(0.001)
    return links


def answered(address: tuple[str, int], join: Join) -> tuple[float, str]:
    """Seconds until a host that asks to join is answered, and the kind of the answer."""
    began = time.monotonic()
    links = connected(address)
    try:
        links.send(LAUNCHER, join)
        while (arrived := links.receive(0.01)) is None:
            pass
        return time.monotonic() - began, type(unpacked(arrived[1])[0]).__name__
    finally:
        links.bus.close(0.0)


def closed(address: tuple[str, int], data: bytes, more: bytes = b"") -> float:
    """Seconds until the coordinator closes the connection of a stranger, who sends a byte of `more` every 2 s."""
    began, left = time.monotonic(), iter(more)
    with socket.create_connection(address) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(data)
        stranger.settimeout(2.0 if more else None)
        while True:
            try:
                if not stranger.recv(1 << 16):
                    break
            except TimeoutError:
                stranger.sendall(bytes([next(left)]))
    return time.monotonic() - began


def another_version() -> str:
    with coordinator() as address:
        found = [answered(address, msgspec.structs.replace(JOIN, version="0.0")) for _ in range(RUNS)]
    assert {kind for _, kind in found} == {"Refused"}
    return f"refused {text([seconds for seconds, _ in found])} after the host connected"


def garbage() -> str:
    with coordinator() as address:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = [closed(address, b"GET / HTTP/1.1\r\n\r\n" * 10) for _ in range(300)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"closed after {text(seconds)}; 300 such connections took {grown / 1024:.1f} MiB of memory"


def replayed() -> str:
    sent = bytearray()

    class Tapped(socket.socket):
        def send(self, data: object, flags: int = 0) -> int:  # type: ignore[override]
            count = super().send(data, flags)  # type: ignore[arg-type]
            sent.extend(memoryview(data)[:count])  # type: ignore[arg-type]
            return count

    with coordinator() as address, mock.patch("socket.socket", Tapped):
        answered(address, JOIN)
    with coordinator() as address:
        seconds = [closed(address, bytes(sent)) for _ in range(RUNS)]
    return f"closed after {text(seconds)}"


def scanned() -> str:
    seconds = []
    for _ in range(RUNS):
        with coordinator() as address, contextlib.ExitStack() as stack:
            for _ in range(1000):
                stack.enter_context(socket.create_connection(address))
            took, kind = answered(address, JOIN)
            assert kind == "Accepted"
            seconds.append(took)
    return f"a host was admitted after {text(seconds)} while 1,000 idle connections were opened"


def announced() -> str:
    with coordinator() as address:
        tracemalloc.start()
        seconds = []
        for _ in range(RUNS):
            began = time.monotonic()
            links = connected(address)
            connection = links.bus._peers[LAUNCHER]
            links.bus._flush(connection, memoryview(struct.pack("<IQQ", (1 << 32) - 1, 1 << 62, 0)))
            while links.bus.connected(LAUNCHER):
                links.receive(0.001)
            seconds.append(time.monotonic() - began)
            links.bus.close(0.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_HEADER * 4
    return f"closed after {text(seconds)}; at most {peak / 1024:.0f} KiB were allocated, for 2⁶² announced bytes"


def compressed() -> str:
    worst, elements = 0.0, 1 << 20
    for name in registry.names("codec"):
        with contextlib.suppress(TypeError):
            codec = Codec.parse(name)
            for data in (b"", b"\xff" * 16, b"\xff" * 64, b"\0" * 64):
                tracemalloc.start()
                with contextlib.suppress(ProtocolError):
                    codec.decode(np.frombuffer(data, np.uint8), elements, "float32")
                worst = max(worst, tracemalloc.get_traced_memory()[1] / (4 * elements))
                tracemalloc.stop()
    return f"at most {worst:.1f} times the declared array was allocated, over all codecs"


def slow() -> str:
    hello = bytes(Handshake(SECRET.encode(), connects=True, encrypts=True).out)
    with coordinator() as address:
        seconds = closed(address, hello[:1], hello[1:])
    return f"closed {seconds:.1f} s after the connection was opened"


MEASUREMENTS: dict[str, Callable[[], str]] = {
    "SIGKILL ends a worker in the middle of a push": killed_worker,
    "SIGKILL ends a parameter server": killed_server,
    "SIGKILL ends the launcher": killed_launcher,
    "SIGSTOP for longer than the heartbeat, then SIGCONT": stopped_worker,
    "a link between hosts drops data": link("drop", True),
    "a link between hosts repeats data": link("repeat", True),
    "a link between hosts changes the order of data": link("reorder", True),
    "a link between hosts changes a byte": link("corrupt", True),
    "the network between two groups of hosts is cut": cut(one_way=False),
    "messages pass in one direction only": cut(one_way=True),
    "a TCP connection is half open": link("half_open", False),
    "SIGKILL while a checkpoint is written": resumed,
    "a gradient is not finite": bad_gradient,
    "another version of the library on a host": another_version,
    "garbage, HTTP, a TLS hello or pickled data arrives at a port": garbage,
    "a recorded session is replayed": replayed,
    "a port scan and 1,000 idle connections": scanned,
    "a length of 2⁶² or a negative length is announced": announced,
    "a few compressed bytes that announce a large array": compressed,
    "a stranger sends one byte now and then": slow,
    "the disk is full while a checkpoint is written": full_disk,
    "an array of the wrong shape or dtype": another_shape,
    "the wall clock jumps": clock_jumps,
    "fork after threads; a notebook": with_threads,
    "SIGTERM, Ctrl-C, or a process killed for lack of memory": terminated,
    "two runs on one port or in one folder; a process of an earlier run": in_use,
    "a worker joins during the run": joined,
    "all processes die at once": resumed,
}
"""Fault, as docs/fault_scenarios.toml calls it → its measurement."""


def main() -> None:
    """Measure the faults in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {FIGURES.name}")
    options = parser.parse_args()
    found: dict[str, str] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for fault, measurement in MEASUREMENTS.items():
        if options.words and not any(word in fault for word in options.words):
            continue
        try:
            found[fault] = measurement()
        except (subprocess.CalledProcessError, statistics.StatisticsError, AssertionError, IndexError) as error:
            print(f"{fault}: FAILED, {error!r}", flush=True)
            continue
        print(f"{fault}: {found[fault]} (load {os.getloadavg()[0]:.0f})", flush=True)
        if options.write:
            FIGURES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
