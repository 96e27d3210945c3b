"""Machines as network, process and mount namespaces on one bridge: each has an address, its own processes and
/dev/shm, and a link that can be cut, limited, delayed, stalled or made half-open."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OWN_SHM = 'mount -t tmpfs shm /dev/shm && exec "$@"'


class WireProcess:
    """A running wire: see tests/extras/cluster/wire.py."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def set(self, command: str) -> None:
        """Start or end a fault: `delay SECONDS`, `stall`, `mute`, or `flow` (no fault)."""
        assert self._process.stdin
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def counts(self) -> dict[str, int]:
        """Return the number of frames so far, by device and by fault."""
        self.set("count")
        assert self._process.stdout
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts


class Namespaces:
    """`count` machines, numbered from 1, on a bridge that also connects this machine."""

    def __init__(self, count: int) -> None:
        self._tag = f"{os.getpid() % 100000}"
        self._net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._bridge = f"ssb{self._tag}"
        self.count = count

    def address(self, number: int) -> str:
        return f"{self._net}.{number}"

    def name(self, number: int) -> str:
        return f"ss{self._tag}-{number}"

    def _outer(self, number: int) -> str:
        return f"ssv{self._tag}.{number}"

    def command(self, number: int, *command: str) -> list[str]:
        """Return a command that runs another command in a machine, as its first process."""
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return ["ip", "netns", "exec", self.name(number), *alone, "sh", "-c", OWN_SHM, "sh", *command]

    def up(self) -> None:
        """Create the machines. Raises OSError or CalledProcessError if namespaces are not permitted."""
        # The bridge gets an address of its own. Otherwise its address would change with its ports, unnoticed
        # by machines.
        _ip(f"link add {self._bridge} address 02:00:00:00:00:fe type bridge")
        _ip(f"addr add {self.address(254)}/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        for number in range(1, self.count + 1):
            name, outer = self.name(number), self._outer(number)
            _ip(f"netns add {name}")
            _ip(f"link add {outer} type veth peer name eth0 netns {name}")
            _ip(f"link set {outer} master {self._bridge} up")
            _ip(f"-n {name} addr add {self.address(number)}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")

    def cut(self, number: int) -> None:
        _ip(f"-n {self.name(number)} link set eth0 down")

    def restore(self, number: int) -> None:
        _ip(f"-n {self.name(number)} link set eth0 up")

    def limit(self, number: int, rate: str) -> None:
        """Limit the rate at which a machine sends, such as "1gbit"."""
        command = f"qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 50ms"
        subprocess.run(["tc", "-n", self.name(number), *command.split()], check=True, capture_output=True)

    @contextmanager
    def wired(self, number: int) -> Iterator[WireProcess]:
        """Put a wire between a machine's link and the bridge."""
        segment = f"ssw{self._tag}.{number}"
        devices = [f"sst{self._tag}.{number}{end}" for end in "ab"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.extras.cluster.wire", *devices],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout
            assert process.stdout.readline() == "up\n", "there is no wire"
            _ip(f"link add {segment} type bridge")
            _ip(f"link set {segment} up")
            for device, bridge in zip(devices, (segment, self._bridge), strict=True):
                _ip(f"link set {device} master {bridge} up")
            _ip(f"link set {self._outer(number)} master {segment}")
            yield WireProcess(process)
        finally:
            with suppress(subprocess.CalledProcessError):
                _ip(f"link set {self._outer(number)} master {self._bridge}")
            process.communicate()
            with suppress(subprocess.CalledProcessError):
                _ip(f"link del {segment}")

    def down(self) -> None:
        for number in range(1, self.count + 1):
            # A namespace ends with its last process; its link is removed now.
            for command in (f"link del {self._outer(number)}", f"netns del {self.name(number)}"):
                with suppress(subprocess.CalledProcessError, OSError):
                    _ip(command)
        with suppress(subprocess.CalledProcessError, OSError):
            _ip(f"link del {self._bridge}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@contextmanager
def namespaces(count: int) -> Iterator[Namespaces]:
    made = Namespaces(count)
    try:
        made.up()
        yield made
    finally:
        made.down()


def why_not_permitted() -> str:
    """Return why namespaces cannot be created here; empty if they can."""
    try:
        with namespaces(1) as made:
            subprocess.run(made.command(1, "true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


def why_no_wire() -> str:
    """Return why namespaces with wires cannot be created here; empty if they can."""
    permitted = os.access("/dev/net/tun", os.R_OK | os.W_OK)
    return why_not_permitted() or ("" if permitted else "/dev/net/tun is missing or not permitted here")
