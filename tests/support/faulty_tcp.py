"""A transport for real runs whose links go through a proxy that injects faults; it is read with --import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flockstep import registry
from flockstep.links.kinds import Tcp
from flockstep.links.streams import StreamBus
from flockstep.links.wire import SenderIdentity
from flockstep_lab.link_faults import FaultProxy


@dataclass(frozen=True)
class FaultyTcp(Tcp):
    """TCP over the loopback address, with the sessions of links between hosts; `log` lists the faults that fired."""

    faults: str = "cut"
    seed: int = 0
    every: int = 100_000
    log: str = ""
    outage: float = 2.0

    @property
    def encrypts(self) -> bool:
        """The field `encrypt`, on the loopback address too."""
        return self.encrypt

    def bus(
        self, me: SenderIdentity, directory: Path, name: str, heartbeat: float = 5.0, link_timeout: float = 60.0
    ) -> StreamBus:
        """A bus whose address is the address of the proxy."""
        listen = self.listen(directory, name)
        bus = StreamBus(me, listen, False, self.encrypts, heartbeat, link_timeout, local_sessions=True)
        host, _, port = bus.address.removeprefix("tcp://").rpartition(":")

        def fire(fault: str) -> None:
            with Path(self.log).open("a") as out:
                out.write(f"{name} {fault}\n")

        faults, seed = tuple(self.faults.split("+")), 1000 * self.seed + me.address
        proxy = FaultProxy((host, int(port)), faults, seed, self.every, len(faults), fire, self.outage)
        bus.address = f"tcp://{proxy.address[0]}:{proxy.address[1]}"
        return bus


registry.register("transport", "faulty_tcp", FaultyTcp)
