"""A real Slurm cluster on loopback: munged, slurmctld and a slurmd for each node, in a folder of the test's own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.peers import require
from tests.peers.ports import free_port

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "scontrol")
HELPER: Final = (sys.executable, "-I", "-m", "powerguard.effectors.slurm.helper")
WAIT_S: Final = 60.0


class Cluster:
    """The cluster. folder: short, because a UNIX socket's path has at most 107 bytes."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)
        self.conf = folder / "slurm.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        folder.chmod(0o755)  # other users' commands read slurm.conf and reach munged
        for name in ("state", "run", "log", *(f"spool/{node}" for node in nodes)):
            (folder / name).mkdir(parents=True)
        (folder / "munge").mkdir(mode=0o700)
        key = folder / "munge/munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._configure()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def _configure(self) -> None:
        here, host = self.folder, socket.gethostname().partition(".")[0]
        nodes = "".join(
            f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=1000\n"
            for node in self.nodes
        )
        self.conf.write_text(
            f"""ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={here}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/run/slurmctld.pid
SlurmdPidFile={here}/run/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=1
SlurmdTimeout=300
KillWait=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmctldTimeout=30
JobRequeue=1
{nodes}NodeName=far NodeHostName=elsewhere NodeAddr=127.0.0.1 Port=1 CPUs=1 RealMemory=1 State=DOWN
PartitionName=p Nodes={",".join(self.nodes)} Default=YES MaxTime=INFINITE State=UP
"""
        )

    def returns_to_service(self, how: int) -> None:
        """Set ReturnToService: which nodes that are down slurmctld itself gives back once their slurmd answers."""
        text = re.sub(r"^ReturnToService=.*$", f"ReturnToService={how}", self.conf.read_text(), flags=re.MULTILINE)
        self.conf.write_text(text)
        self.ask("scontrol", "reconfigure")
        shown = re.compile(rf"^ReturnToService *= {how}$", re.MULTILINE)
        self.until(lambda: shown.search(self.ask("scontrol", "show", "config")), f"ReturnToService is {how}")

    def start(self) -> None:
        """Start all of it and wait until every node is idle."""
        self.start_munged()
        self.start_slurmctld("-c")
        for node in self.nodes:
            self.start_slurmd(node)
        self.until(lambda: all(self.state(node) == "IDLE" for node in self.nodes), "the nodes are idle")

    def start_munged(self) -> None:
        """Start it, and wait until it listens."""
        here = self.folder
        arguments = [
            "munged",
            "--foreground",
            f"--key-file={here}/munge/munge.key",
            f"--socket={here}/munge.sock",
            f"--pid-file={here}/munge/munged.pid",
            f"--log-file={here}/munge/munged.log",
            f"--seed-file={here}/munge/seed",
            "--force",
        ]
        self._start("munged", arguments)
        self.until(lambda: _listens(here / "munge.sock"), "munged listens")

    def start_slurmctld(self, *arguments: str) -> None:
        """Start the controller. arguments: "-c" forgets what it knew."""
        self._start("slurmctld", ["slurmctld", "-D", *arguments, "-f", str(self.conf)])

    def start_slurmd(self, node: str, *arguments: str) -> None:
        """Start a node's daemon. arguments: "-b" says that the node has rebooted."""
        self._start(node, ["slurmd", "-D", "-N", node, *arguments, "-f", str(self.conf)])

    def _start(self, name: str, arguments: list[str]) -> None:
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                arguments, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon: "munged", "slurmctld" or a node."""
        self._running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a daemon, and wait for its end."""
        process = self._running.pop(name)
        process.kill()
        process.wait(60)

    def reboot(self, node: str) -> None:
        """Have its host boot: slurmctld sees that only in another second than that of the node's last answer."""
        self.kill(node)
        killed_s = time.time()
        self.until(lambda: time.time() >= killed_s + 1.0, "the next second")
        self.start_slurmd(node, "-b")

    def reboot_unexpectedly(self, node: str, reason: str) -> None:
        """Reboot until slurmctld gives this reason for the node being down.

        It compares whole seconds: it sees no boot if the node's new daemon has answered it, say about a job that it
        ended, before that daemon has registered.
        """
        for _ in range(4):
            self.reboot(node)
            with contextlib.suppress(AssertionError):
                return self.until(lambda: self.node(node)["Reason"] == reason, "slurmctld has seen the boot", 20.0)
        msg = f"slurmctld has seen none of four boots of {node}: its state is {self.state(node)}"
        raise AssertionError(msg)

    def ask(self, *arguments: str) -> str:
        """Run one of Slurm's commands and return what it printed."""
        done = subprocess.run(arguments, env=self.env, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    def node(self, node: str) -> dict[str, str]:
        """Return what the controller knows of a node."""
        text = self.ask("scontrol", "--oneliner", "show", "node", node)
        result = dict(pair.split("=", 1) for pair in text.split() if "=" in pair)
        result["Reason"] = text.partition(" Reason=")[2].partition(" [")[0]
        return result

    def state(self, node: str) -> str:
        """Return a node's state, such as IDLE or DOWN+DRAIN; "" while nobody answers."""
        try:
            return self.node(node)["State"]
        except (subprocess.SubprocessError, KeyError):
            return ""

    def job(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        text = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch job and return its id once it runs."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        id_ = self.ask(
            "sbatch", "--parsable", f"--output={self.folder}/job-%j.out", "--open-mode=append", *options, str(path)
        )
        self.until(lambda: self.job(id_)["JobState"] == "RUNNING", f"job {id_} runs")
        return id_

    def clear(self) -> None:
        """End all jobs and put every node into service, as the rig began."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--full", "--quiet", "--user=root")
        for node in self.nodes:
            if self.node(node)["State"] != "IDLE":
                with contextlib.suppress(subprocess.SubprocessError):
                    self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.until(lambda: self.ask("squeue", "--noheader") == "", "no job is left")
        self.until(lambda: all(self.is_idle(node) for node in self.nodes), "the nodes are idle")

    def is_idle(self, node: str) -> bool:
        """Say whether it is in service; one that was down answers the controller's next ping."""
        state = self.state(node)
        return state.startswith("IDLE") and "DRAIN" not in state

    def until(self, holds: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
        """Wait until it holds. A command that fails is tried again: a busy slurmctld does not answer each."""

        def is_so() -> object:
            try:
                return holds()
            except subprocess.SubprocessError:
                return False

        by_s = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > by_s:
                logs = "\n".join(
                    f"{p.name}: {p.read_text(errors='replace')[-2000:]}" for p in (self.folder / "log").iterdir()
                )
                jobs = ""
                with contextlib.suppress(subprocess.SubprocessError):
                    jobs = self.ask("scontrol", "--oneliner", "show", "job")
                msg = f"not after {limit_s:g} s: {what}\n{jobs}\n{logs}"
                raise AssertionError(msg)
            time.sleep(0.1)

    def stop(self) -> None:
        """End all that was started, jobs included."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):  # the controller may be gone already
            self.ask("scancel", "--full", "--quiet", "--user=root")
            self.until(lambda: self.ask("squeue", "--noheader") == "", "no job is left", 15.0)
        for process in reversed(self._running.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in reversed(self._running.values()):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _listens(path: Path) -> bool:
    """Say whether a program listens there: the file alone may be one that a killed program has left."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def helper_listening(cluster: Cluster) -> Iterator[Path]:
    """The socket of the real helper, which systemd-socket-activate starts for each connection."""
    path = cluster.folder / "slurm.sock"
    argv = [require("systemd-socket-activate"), "--accept", "--inetd", f"--listen={path}"]
    argv += [f"--setenv=SLURM_CONF={cluster.conf}", f"--setenv=PATH={cluster.env['PATH']}", *HELPER, "serve"]
    log = cluster.folder / "log/helper.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        cluster.until(lambda: b"Listening on" in log.read_bytes(), "the helper listens")
        yield path
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def running(folder: Path, nodes: Sequence[str]) -> Iterator[Cluster]:
    """Have a cluster for the length of a block. Slurm wants root: it starts jobs as their users."""
    for program in PROGRAMS:
        require(program)
    if os.geteuid() != 0:
        pytest.skip("slurmctld and slurmd want root")
    rig = Cluster(folder, nodes)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
