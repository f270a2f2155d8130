"""The raw requests of IPVS into an empty kernel: `python -m bench.ipvs_floor SERVICES ENDPOINTS`.

In a network namespace of its own: for two minutes the kernel searches all that was deleted before for each
new destination, so that a second load would take ten times as long.
"""

import sys
import time

from bench.kernel import views
from bench.line import prepare_namespace
from rulecast.model import Family
from rulecast_agent.kernel.ipvs import PROTOCOLS, Ipvs, Scheduling, VirtualServer


def main(services: int, endpoints: int) -> float:
    """Milliseconds for all requests, packed before."""
    # The kernel takes no destination for which it has no route of any kind.
    prepare_namespace()
    ipvs = Ipvs()
    requests = []
    for view in views(services, endpoints).values():
        server = VirtualServer(Family.IPV4, PROTOCOLS["TCP"], view.service.cluster_ip, view.service.port)
        requests.append(ipvs.add(server, Scheduling("rr")))
        requests += [ipvs.add_destination(server, endpoint) for endpoint in view.cluster]
    begin = time.perf_counter()
    failed = ipvs.commit(requests)
    spent = (time.perf_counter() - begin) * 1000
    assert not failed, f"{len(failed)} refused"
    return spent


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
