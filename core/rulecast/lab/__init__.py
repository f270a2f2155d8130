"""A small cluster in network namespaces on one machine: nodes, pods, an outside client, real packets.

Used by `rulecast demo` and by the packet tests. It knows nothing of servers, agents or rules: it makes the
machines that they run on, the backends that answer and the probes that ask. Needs root, the `ip` command and
kernel network namespaces; touches nothing outside the namespaces that it makes.
"""

from rulecast.lab.echo import EchoServers
from rulecast.lab.netns import LabError, Namespace, unavailable
from rulecast.lab.probe import Answer, Probe, Reached, Verdict, run_probes
from rulecast.lab.topology import Host, Lab, Node, Pod

__all__ = [
    "Answer",
    "EchoServers",
    "Host",
    "Lab",
    "LabError",
    "Namespace",
    "Node",
    "Pod",
    "Probe",
    "Reached",
    "Verdict",
    "run_probes",
    "unavailable",
]
