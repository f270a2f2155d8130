"""Which objects are watched: kube-proxy's selectors, for the request and for objects from elsewhere."""

import msgspec

from rulecast_server.kube.objects import ApiObject, EndpointSlice, Node, Service, ServiceCIDR

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

_OURS = f"!{PROXY_NAME_LABEL},!{HEADLESS_LABEL}"


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One watched collection."""

    plural: str
    path: str
    """Of the collection over all namespaces, from the root of the API server."""
    api_version: str
    kind: type[ApiObject]
    namespaced: bool
    label_selector: str = ""
    field_selector: str = ""
    required: bool = True
    """Nothing counts as synced without it. The others may be missing from a cluster altogether."""


SERVICES = Resource(
    plural="services",
    path="/api/v1/services",
    api_version="v1",
    kind=Service,
    namespaced=True,
    label_selector=_OURS,
    field_selector="spec.clusterIP!=None",
)
ENDPOINT_SLICES = Resource(
    plural="endpointslices",
    path="/apis/discovery.k8s.io/v1/endpointslices",
    api_version="discovery.k8s.io/v1",
    kind=EndpointSlice,
    namespaced=True,
    label_selector=_OURS,
)
NODES = Resource(plural="nodes", path="/api/v1/nodes", api_version="v1", kind=Node, namespaced=False)
SERVICE_CIDRS = Resource(
    plural="servicecidrs",
    path="/apis/networking.k8s.io/v1/servicecidrs",
    api_version="networking.k8s.io/v1",
    kind=ServiceCIDR,
    namespaced=False,
    required=False,
)
RESOURCES = (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS)


def selected(item: ApiObject) -> bool:
    """Whether the API server's side of the selectors would let this object through.

    Applied to everything that is decoded: a server may refuse the field selector, manifests pass no server.
    """
    if isinstance(item, Service | EndpointSlice):
        labels = item.metadata.labels
        if labels and (PROXY_NAME_LABEL in labels or HEADLESS_LABEL in labels):
            return False
    return not (isinstance(item, Service) and item.spec.cluster_ip == "None")
