"""The daemon of loadgen under the name the tests here use."""

from loadgen.daemon import Daemon
from loadgen.ports import free_port

__all__ = ["Daemon", "free_port"]
