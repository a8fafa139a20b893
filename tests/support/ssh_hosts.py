"""Hosts with sshd on this machine: namespaces of network, PID, mount and UTS, with their own /tmp and /dev/shm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

_SSHD = """\
Port 2222
ListenAddress {address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv PYTHONPATH={root}
"""
_CONFIG = """\
Host {names} nowhere
  Port 2222
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
Host locked changed
  Port 2222
  User root
  HostName {net}.1
Host changed
  UserKnownHostsFile {folder}/known_others
Host locked
  UserKnownHostsFile {folder}/known_locked
  IdentityFile {folder}/stranger
  IdentitiesOnly yes
  StrictHostKeyChecking accept-new
"""
# Hosts run the Python of the project. It may be in /tmp itself, so it is mounted again below the new /tmp.
_INSIDE = """\
kept=$(mktemp -d /run/nbkit-XXXXXX) && mount --bind {root} $kept
mount -t tmpfs tmpfs /tmp && mkdir -p {root} && mount --move $kept {root}; rmdir $kept
mount -t tmpfs tmpfs /dev/shm && hostname {name} && mkdir -p /run/sshd
exec /usr/sbin/sshd -D -f {folder}/{name}.conf -E {folder}/{name}.log
"""


def missing() -> str:
    """Return why there can be no such hosts here, or ""."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in ("sshd", "ssh", "ssh-keygen", "ip", "unshare") if not shutil.which(name, path=path)]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install openssh-server openssh-client iproute2)"
    if os.geteuid() != 0:
        return "hosts of our own need root"
    probe = f"nbk{os.getpid()}x"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine allows no network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


class SshHosts:
    """Hosts with sshd. names: of the hosts, as `ssh` knows them. bin: a folder with that ssh, to be first in PATH.

    This ssh also knows "locked", whose host does not accept the key, and "changed", whose host key differs from the
    known one. The interface of the second host is called ens5, that of the others eth0. root: their PYTHONPATH.
    """

    def __init__(self, root: Path, hosts: int = 2) -> None:
        # Not below /tmp, because the hosts have their own /tmp.
        self.folder = Path(tempfile.mkdtemp(prefix="nbkit-ssh-", dir="/var/tmp"))
        self.tag = f"nbk{os.getpid() % 100000}"
        self.net = f"10.213.{os.getpid() % 250}"
        self.names = tuple(f"node{number + 1}" for number in range(hosts))
        self.bin = self.folder / "bin"
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start(root)
        except BaseException:
            self.close()
            raise

    def _start(self, root: Path) -> None:
        folder = self.folder
        for key in ("hostkey", "id", "stranger"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        fields = {"folder": folder, "net": self.net, "names": " ".join(self.names)}
        addresses = (f"Host {name}\n  HostName {self.net}.{number}\n" for number, name in enumerate(self.names, 1))
        (folder / "config").write_text(_CONFIG.format(**fields) + "".join(addresses))
        words = (folder / "stranger.pub").read_text().split()
        (folder / "known_others").write_text(f"[{self.net}.1]:2222 {words[0]} {words[1]}\n")
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        (self.bin / "ssh").chmod(0o755)
        _run("ip", "link", "add", self.tag, "type", "bridge")
        _run("ip", "addr", "add", f"{self.net}.254/24", "dev", self.tag)
        _run("ip", "link", "set", self.tag, "up")
        for number, name in enumerate(self.names, 1):
            self._add_host(number, name, "ens5" if number == 2 else "eth0", root)
        deadline = time.monotonic() + 20
        while any(_code(str(self.bin / "ssh"), "-o", "BatchMode=yes", name, "true") for name in self.names):
            if time.monotonic() > deadline:
                raise TimeoutError("sshd did not come up")
            time.sleep(0.1)

    def _add_host(self, number: int, name: str, device: str, root: Path) -> None:
        space, veth = f"{self.tag}-{number}", f"{self.tag}v{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", veth, "type", "veth", "peer", "name", device, "netns", space)
        _run("ip", "link", "set", veth, "master", self.tag, "up")
        inside = ("ip", "netns", "exec", space)
        _run(*inside, "ip", "addr", "add", f"{self.net}.{number}/24", "dev", device)
        _run(*inside, "ip", "link", "set", device, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        sshd = _SSHD.format(address=f"{self.net}.{number}", folder=self.folder, root=root)
        (self.folder / f"{name}.conf").write_text(sshd)
        script = _INSIDE.format(name=name, folder=self.folder, root=root)
        space_of_processes = ("unshare", "-u", "-m", "-p", "-f", "--mount-proc", "--kill-child")
        self._daemons.append(subprocess.Popen([*inside, *space_of_processes, "sh", "-c", script]))

    def processes(self, name: str) -> list[str]:
        """Return the command lines of nbkit's processes on a host."""
        done = subprocess.run([self.bin / "ssh", name, "ps -eo args"], capture_output=True, text=True, check=False)
        return [line for line in done.stdout.splitlines() if "nbkit.bridge" in line or "hosts.agent" in line]

    def link(self, number: int, state: str) -> None:
        """Disconnect a host from the network ("down") or connect it ("up")."""
        _run("ip", "link", "set", f"{self.tag}v{number}", state)

    def block(self, state: str, numbers: tuple[int, int] = (1, 2)) -> None:
        """Stop two hosts from reaching each other ("on"), or allow it ("off"). Both always reach this machine."""
        for number in numbers:
            _run("ip", "link", "set", f"{self.tag}v{number}", "type", "bridge_slave", "isolated", state)

    def close(self) -> None:
        """End the hosts and everything on them."""
        for daemon in self._daemons:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        for number in range(1, len(self._daemons) + 1):
            _code("ip", "netns", "del", f"{self.tag}-{number}")
            _code("ip", "link", "del", f"{self.tag}v{number}")
        _code("ip", "link", "del", self.tag)
        shutil.rmtree(self.folder, ignore_errors=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def _code(*words: str) -> int:
    return subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode
