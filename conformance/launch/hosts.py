"""Hosts that are network namespaces of this one, on a switch of their own."""

import os
import subprocess


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


class Hosts:
    """Hosts 1 to n, and the switch 0; gone after the block. Entering is None where this process may not make them."""

    def __init__(self, n):
        self.n, self.prefix = n, f"kolol{os.getpid()}"

    def __enter__(self):
        switch = self.name(0)
        made = ip("netns", "add", switch)
        made = made and ip("-n", switch, "link", "add", "br0", "type", "bridge") and ip("-n", switch, "link", "set", "br0", "up")
        for host in range(1, self.n + 1):
            name = self.name(host)
            made = made and all([
                ip("netns", "add", name),
                ip("link", "add", f"eth{host}", "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", switch),
                ip("-n", switch, "link", "set", f"port{host}", "master", "br0"),
                ip("-n", switch, "link", "set", f"port{host}", "up"),
                ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", f"eth{host}"),
                ip("-n", name, "link", "set", f"eth{host}", "up"),
                ip("-n", name, "link", "set", "lo", "up"),
            ])
        if made:
            return self
        self.__exit__()
        return None

    def __exit__(self, *_):
        for host in range(self.n + 1):
            ip("netns", "del", self.name(host))

    def name(self, host):
        return f"{self.prefix}h{host}"

    def address(self, host):
        return f"10.78.0.{host}"

    def on(self, host, *command):
        """A command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def cut(self, host):
        """Takes a host off the switch."""
        assert ip("-n", self.name(0), "link", "set", f"port{host}", "down")
