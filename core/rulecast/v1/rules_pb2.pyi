from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("fleet", "zone", "node", "mark", "zstd")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    fleet: ScopeFrame
    zone: ScopeFrame
    node: ScopeFrame
    mark: Mark
    zstd: bytes
    def __init__(self, fleet: _Optional[_Union[ScopeFrame, _Mapping]] = ..., zone: _Optional[_Union[ScopeFrame, _Mapping]] = ..., node: _Optional[_Union[ScopeFrame, _Mapping]] = ..., mark: _Optional[_Union[Mark, _Mapping]] = ..., zstd: _Optional[bytes] = ...) -> None: ...

class ScopeFrame(_message.Message):
    __slots__ = ("scope", "reset", "changes", "digest")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    scope: str
    reset: Reset
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    digest: str
    def __init__(self, scope: _Optional[str] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("buckets",)
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("service", "service_removed", "cluster_endpoints", "local_endpoints", "serving_endpoints", "node", "node_removed", "cluster")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SERVING_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    service: Service
    service_removed: str
    cluster_endpoints: Endpoints
    local_endpoints: Endpoints
    serving_endpoints: Endpoints
    node: Node
    node_removed: bool
    cluster: Cluster
    def __init__(self, service: _Optional[_Union[Service, _Mapping]] = ..., service_removed: _Optional[str] = ..., cluster_endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., local_endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., serving_endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., node_removed: _Optional[bool] = ..., cluster: _Optional[_Union[Cluster, _Mapping]] = ...) -> None: ...

class Service(_message.Message):
    __slots__ = ("key", "cluster_ip", "port", "node_port", "external_ips", "load_balancer_ips", "source_ranges", "restrict_sources", "external_local", "internal_local", "affinity_seconds", "health_check_node_port", "has_endpoints")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_IP_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NODE_PORT_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_IPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCER_IPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANGES_FIELD_NUMBER: _ClassVar[int]
    RESTRICT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_LOCAL_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_LOCAL_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_CHECK_NODE_PORT_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    cluster_ip: str
    port: int
    node_port: int
    external_ips: _containers.RepeatedScalarFieldContainer[str]
    load_balancer_ips: _containers.RepeatedScalarFieldContainer[str]
    source_ranges: _containers.RepeatedScalarFieldContainer[str]
    restrict_sources: bool
    external_local: bool
    internal_local: bool
    affinity_seconds: int
    health_check_node_port: int
    has_endpoints: bool
    def __init__(self, key: _Optional[str] = ..., cluster_ip: _Optional[str] = ..., port: _Optional[int] = ..., node_port: _Optional[int] = ..., external_ips: _Optional[_Iterable[str]] = ..., load_balancer_ips: _Optional[_Iterable[str]] = ..., source_ranges: _Optional[_Iterable[str]] = ..., restrict_sources: _Optional[bool] = ..., external_local: _Optional[bool] = ..., internal_local: _Optional[bool] = ..., affinity_seconds: _Optional[int] = ..., health_check_node_port: _Optional[int] = ..., has_endpoints: _Optional[bool] = ...) -> None: ...

class Endpoints(_message.Message):
    __slots__ = ("key", "add", "remove", "removed", "ready", "trigger_time_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    key: str
    add: _containers.RepeatedCompositeFieldContainer[Addresses]
    remove: _containers.RepeatedCompositeFieldContainer[Addresses]
    removed: bool
    ready: int
    trigger_time_ms: int
    def __init__(self, key: _Optional[str] = ..., add: _Optional[_Iterable[_Union[Addresses, _Mapping]]] = ..., remove: _Optional[_Iterable[_Union[Addresses, _Mapping]]] = ..., removed: _Optional[bool] = ..., ready: _Optional[int] = ..., trigger_time_ms: _Optional[int] = ...) -> None: ...

class Addresses(_message.Message):
    __slots__ = ("port", "ips")
    PORT_FIELD_NUMBER: _ClassVar[int]
    IPS_FIELD_NUMBER: _ClassVar[int]
    port: int
    ips: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, port: _Optional[int] = ..., ips: _Optional[_Iterable[str]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "zone", "addresses", "pod_cidrs", "eligible")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    POD_CIDRS_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    zone: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    pod_cidrs: _containers.RepeatedScalarFieldContainer[str]
    eligible: bool
    def __init__(self, name: _Optional[str] = ..., zone: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., pod_cidrs: _Optional[_Iterable[str]] = ..., eligible: _Optional[bool] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("service_cidrs",)
    SERVICE_CIDRS_FIELD_NUMBER: _ClassVar[int]
    service_cidrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, service_cidrs: _Optional[_Iterable[str]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("revision", "time_ms", "resource_versions", "interval_ms", "resync", "changed_versions")
    class ResourceVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ChangedVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    CHANGED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    time_ms: int
    resource_versions: _containers.ScalarMap[str, int]
    interval_ms: int
    resync: int
    changed_versions: _containers.ScalarMap[str, int]
    def __init__(self, revision: _Optional[int] = ..., time_ms: _Optional[int] = ..., resource_versions: _Optional[_Mapping[str, int]] = ..., interval_ms: _Optional[int] = ..., resync: _Optional[int] = ..., changed_versions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("hello", "ack", "resync")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    resync: Resync
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("id", "position")
    ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    id: int
    position: Position
    def __init__(self, id: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node_name", "agent_version", "mode", "position", "compressions", "instance")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPRESSIONS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    agent_version: str
    mode: str
    position: Position
    compressions: _containers.RepeatedScalarFieldContainer[str]
    instance: str
    def __init__(self, node_name: _Optional[str] = ..., agent_version: _Optional[str] = ..., mode: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., compressions: _Optional[_Iterable[str]] = ..., instance: _Optional[str] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("fleet", "zone", "node")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    fleet: ScopePosition
    zone: ScopePosition
    node: ScopePosition
    def __init__(self, fleet: _Optional[_Union[ScopePosition, _Mapping]] = ..., zone: _Optional[_Union[ScopePosition, _Mapping]] = ..., node: _Optional[_Union[ScopePosition, _Mapping]] = ...) -> None: ...

class ScopePosition(_message.Message):
    __slots__ = ("scope", "digest", "buckets")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    scope: str
    digest: str
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, scope: _Optional[str] = ..., digest: _Optional[str] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("revision", "apply_ms", "errors", "error_count", "node_error")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    APPLY_MS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_ERROR_FIELD_NUMBER: _ClassVar[int]
    revision: int
    apply_ms: int
    errors: _containers.RepeatedCompositeFieldContainer[ServiceError]
    error_count: int
    node_error: str
    def __init__(self, revision: _Optional[int] = ..., apply_ms: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[ServiceError, _Mapping]]] = ..., error_count: _Optional[int] = ..., node_error: _Optional[str] = ...) -> None: ...

class ServiceError(_message.Message):
    __slots__ = ("key", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: str
    message: str
    def __init__(self, key: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ListAgentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAgentsResponse(_message.Message):
    __slots__ = ("revision", "agents")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    agents: _containers.RepeatedCompositeFieldContainer[AgentStatus]
    def __init__(self, revision: _Optional[int] = ..., agents: _Optional[_Iterable[_Union[AgentStatus, _Mapping]]] = ...) -> None: ...

class AgentStatus(_message.Message):
    __slots__ = ("node_name", "zone", "peer", "agent_version", "mode", "sent_revision", "acked_revision", "lag_ms", "apply_ms", "errors", "error_count", "node_error", "connected_seconds")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    ACKED_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    APPLY_MS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_ERROR_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    zone: str
    peer: str
    agent_version: str
    mode: str
    sent_revision: int
    acked_revision: int
    lag_ms: int
    apply_ms: int
    errors: _containers.RepeatedCompositeFieldContainer[ServiceError]
    error_count: int
    node_error: str
    connected_seconds: int
    def __init__(self, node_name: _Optional[str] = ..., zone: _Optional[str] = ..., peer: _Optional[str] = ..., agent_version: _Optional[str] = ..., mode: _Optional[str] = ..., sent_revision: _Optional[int] = ..., acked_revision: _Optional[int] = ..., lag_ms: _Optional[int] = ..., apply_ms: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[ServiceError, _Mapping]]] = ..., error_count: _Optional[int] = ..., node_error: _Optional[str] = ..., connected_seconds: _Optional[int] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("names", "behind")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    behind: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., behind: _Optional[bool] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("revision", "resource_versions", "total", "current", "nodes")
    class ResourceVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    revision: int
    resource_versions: _containers.ScalarMap[str, int]
    total: int
    current: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, revision: _Optional[int] = ..., resource_versions: _Optional[_Mapping[str, int]] = ..., total: _Optional[int] = ..., current: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("name", "registered", "connected", "current", "zone", "agents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    registered: bool
    connected: bool
    current: bool
    zone: str
    agents: _containers.RepeatedCompositeFieldContainer[AgentStatus]
    def __init__(self, name: _Optional[str] = ..., registered: _Optional[bool] = ..., connected: _Optional[bool] = ..., current: _Optional[bool] = ..., zone: _Optional[str] = ..., agents: _Optional[_Iterable[_Union[AgentStatus, _Mapping]]] = ...) -> None: ...

class WatchNodesRequest(_message.Message):
    __slots__ = ("names", "interval_ms")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    interval_ms: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class NodeChanges(_message.Message):
    __slots__ = ("revision", "nodes", "removed")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class WaitAppliedRequest(_message.Message):
    __slots__ = ("service", "resource_versions", "gone", "percent", "connected_only", "timeout_ms")
    class ResourceVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_ONLY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    service: str
    resource_versions: _containers.ScalarMap[str, int]
    gone: bool
    percent: int
    connected_only: bool
    timeout_ms: int
    def __init__(self, service: _Optional[str] = ..., resource_versions: _Optional[_Mapping[str, int]] = ..., gone: _Optional[bool] = ..., percent: _Optional[int] = ..., connected_only: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WaitAppliedResponse(_message.Message):
    __slots__ = ("applied", "reason", "revision", "ports", "nodes", "nodes_applied", "missing", "waited_ms")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    applied: bool
    reason: str
    revision: int
    ports: int
    nodes: int
    nodes_applied: int
    missing: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    waited_ms: int
    def __init__(self, applied: _Optional[bool] = ..., reason: _Optional[str] = ..., revision: _Optional[int] = ..., ports: _Optional[int] = ..., nodes: _Optional[int] = ..., nodes_applied: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., waited_ms: _Optional[int] = ...) -> None: ...
