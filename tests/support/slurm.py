"""A Slurm cluster on hosts of this machine: slurmctld on the first host, slurmd on each of the others."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.hosts import Host
from support.processes import PATIENCE, content, wait_until

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
CPUS = 8
SETTINGS = """
ClusterName=flockstep
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
NODE = "NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} Port=6818 CPUs={cpus}\n"


def start(folder: Path, hosts: Sequence[Host]) -> Path:
    """Start the daemons, and wait until every node is idle; return SLURM_CONF for srun and sbatch."""
    folder.mkdir(parents=True, exist_ok=True)
    controller, *nodes = hosts
    settings = folder / "slurm.conf"
    lines = [NODE.format(host=host, cpus=CPUS) for host in nodes]
    settings.write_text(SETTINGS.format(controller=controller, folder=folder) + "".join(lines))
    _authenticate(folder / "munge", controller)
    for host in hosts:
        own = ["slurmd", "-N", host.name] if host is not controller else ["slurmctld"]
        host.daemon(folder / f"{host.name}.out", *own, "-D", "-f", str(settings))

    def ready() -> bool:
        ask = controller.command("env", f"SLURM_CONF={settings}", "sinfo", "-h", "-o", "%T %D")
        done = subprocess.run(ask, check=False, capture_output=True, text=True)
        return done.stdout.split() == ["idle", str(len(nodes))]

    wait_until(ready, PATIENCE, f"a Slurm cluster with {len(nodes)} idle nodes; see {folder}")
    return settings


def _authenticate(folder: Path, host: Host) -> None:
    """Start munged, whose socket all hosts reach through the file system."""
    folder.mkdir()
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    # --force: folders above may be writable for others, as /tmp is.
    host.daemon(folder / "out", "munged", "--foreground", "--force", *options)
    wait_until((folder / "socket").exists, PATIENCE, f"munged: {content(folder / 'log')!r}")
