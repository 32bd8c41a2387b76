"""ACME's memory is the host's: the host runtime has everything that is needed."""

from kvcore.runtime import HostRuntime


class AcmeRuntime(HostRuntime):
    """Streams, events and host memory."""
