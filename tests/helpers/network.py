"""Two hosts on one machine, and the cable between them."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path


class Network:
    """Two network namespaces on this machine, joined by a cable that can be cut."""

    def __init__(self) -> None:
        self.names = [f"jshard-{uuid.uuid4().hex[:6]}" for _ in range(2)]
        self._hosts = [Path("/etc/netns") / name for name in self.names]
        for name in self.names:
            self._ip("netns", "add", name)
        a, b = self.names
        self._ip("-n", a, "link", "add", "to", "type", "veth", "peer", "to", "netns", b)
        host = os.uname().nodename
        for index, name in enumerate(self.names):
            address = self.address(index)
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "to")
            for link in ("lo", "to"):
                self._ip("-n", name, "link", "set", link, "up")
            # Gloo listens where the machine's name points to.
            self._hosts[index].mkdir(parents=True)
            text = f"127.0.0.1 localhost\n{address} {host}\n"
            (self._hosts[index] / "hosts").write_text(text)

    def address(self, index: int) -> str:
        return f"10.213.7.{index + 1}"

    def run_in(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]]

    def cut(self) -> None:
        self._ip("-n", self.names[1], "link", "set", "to", "down")

    def remove(self) -> None:
        for name, folder in zip(self.names, self._hosts, strict=True):
            self._ip("netns", "delete", name)
            shutil.rmtree(folder)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
