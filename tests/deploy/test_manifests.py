"""deploy/: whole, least in rights, and with command lines that the commands accept."""

from pathlib import Path

import pytest
import yaml

from rulecast_agent import settings as agent_settings
from rulecast_server import settings as server_settings
from rulecast_server.certs import command as certs_command
from tests.deploy.manifests import (
    DEPLOY,
    KUBECTL,
    Object,
    arguments,
    choices,
    cluster_environment,
    find,
    pods,
    render,
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed")

every_choice = pytest.mark.parametrize(
    "components", [(), *choices()], ids=lambda names: "+".join(names) or "default"
)


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


@every_choice
def test_every_reference_leads_to_an_object_that_is_there_or_made_in_the_cluster(components) -> None:
    objects = render(*components)
    there = {(each["kind"], each["metadata"]["name"]) for each in objects}
    if "certs-cert-manager" in components:
        there |= {("Secret", each["spec"]["secretName"]) for each in objects if each["kind"] == "Certificate"}
    else:
        # What `rulecast certs` writes, by its defaults.
        names = certs_command.parse([]).names
        there |= {("Secret", names.server), ("ConfigMap", names.bundle)}
    wanted = set()
    for _, pod in pods(objects):
        spec = pod["spec"]
        wanted.add(("ServiceAccount", spec["serviceAccountName"]))
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                wanted.add(("Secret", volume["secret"]["secretName"]))
            if "configMap" in volume:
                wanted.add(("ConfigMap", volume["configMap"]["name"]))
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        mounts = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", ())}
        assert mounts == volumes
        for container in containers(pod):
            wanted |= {("ConfigMap", each["configMapRef"]["name"]) for each in container.get("envFrom", ())}
    for each in objects:
        if "roleRef" in each:
            wanted.add((each["roleRef"]["kind"], each["roleRef"]["name"]))
            wanted |= {("ServiceAccount", subject["name"]) for subject in each["subjects"]}
    assert wanted <= there
    assert len(there) >= len(objects)


@every_choice
def test_selectors_choose_pods_that_exist(components) -> None:
    objects = render(*components)
    labels = [pod["metadata"]["labels"].items() for _, pod in pods(objects)]
    for each in objects:
        spec = each.get("spec", {})
        chosen = (
            spec.get("selector") if each["kind"] == "Service" else spec.get("selector", {}).get("matchLabels")
        )
        if each["kind"] == "NetworkPolicy":
            chosen = spec["podSelector"].get("matchLabels", {})
        if each["kind"] == "ServiceMonitor":
            labels_of_services = [
                service["metadata"]["labels"].items() for service in objects if service["kind"] == "Service"
            ]
            assert any(chosen.items() <= found for found in labels_of_services)
        elif chosen is not None:
            assert any(chosen.items() <= found for found in labels), each["metadata"]["name"]


@every_choice
def test_no_container_has_more_than_it_needs(components) -> None:
    added = {}
    for name, pod in pods(render(*components)):
        spec = pod["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert not spec.get("hostPID")
        assert not spec.get("hostIPC")
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert not security.get("privileged")
            assert security["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            added[name, container["name"]] = security["capabilities"].get("add", [])
            if name != "DaemonSet/rulecast-agent":
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert "runAsUser" not in security
    agent = added.pop(("DaemonSet/rulecast-agent", "agent"))
    assert agent == (["NET_ADMIN", "NET_RAW"] if "mode-iptables" in components else ["NET_ADMIN"])
    if "mode-ipvs" in components:
        assert added.pop(("DaemonSet/rulecast-agent", "modules")) == ["SYS_MODULE"]
    assert not any(added.values())


@every_choice
def test_host_paths_are_those_of_the_agent_and_modules_are_only_read(components) -> None:
    for name, pod in pods(render(*components)):
        paths = {
            volume["name"]: volume["hostPath"]["path"]
            for volume in pod["spec"].get("volumes", ())
            if "hostPath" in volume
        }
        if name == "DaemonSet/rulecast-agent":
            assert sorted(paths.values()) == [
                *("/lib/modules", "/proc/sys/net", "/run/xtables.lock", "/var/lib/rulecast")
            ]
            for container in containers(pod):
                for mount in container["volumeMounts"]:
                    if mount["name"] in ("modules", "ca", "token"):
                        assert mount["readOnly"] is True
        else:
            assert not paths


def test_rights_are_exactly_those_that_the_documentation_tells() -> None:
    objects = render()
    rights = {
        (each["kind"], each["metadata"]["name"]): {
            (resource, verb, tuple(rule.get("resourceNames", ())))
            for rule in each["rules"]
            for resource in rule.get("resources", rule.get("nonResourceURLs"))
            for verb in rule["verbs"]
        }
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    watched = ("services", "nodes", "endpointslices", "servicecidrs")
    asked = ("tokenreviews", "subjectaccessreviews")
    secrets, maps = ("rulecast-authority", "rulecast-server-tls"), ("rulecast-ca",)
    kept = ("get", "create", "patch")
    assert rights == {
        ("ClusterRole", "rulecast-server"): {
            *((resource, verb, ()) for resource in watched for verb in ("list", "watch")),
            *((resource, "create", ()) for resource in asked),
        },
        ("Role", "rulecast-agent"): {("endpointslices", "list", ())},
        ("Role", "rulecast-certs"): {
            *(("secrets", verb, secrets) for verb in kept),
            *(("configmaps", verb, maps) for verb in kept),
        },
        ("ClusterRole", "rulecast-inspect"): {
            ("/rulecast.v1.Nodes/*", "get", ()),
            ("/rulecast.v1.Rules/ListAgents", "get", ()),
            ("/grpc.reflection.v1alpha.ServerReflection/*", "get", ()),
        },
    }
    bound = {
        (each["kind"], each["roleRef"]["name"]): [subject["name"] for subject in each["subjects"]]
        for each in objects
        if "roleRef" in each
    }
    assert bound == {
        ("ClusterRoleBinding", "rulecast-server"): ["rulecast-server"],
        ("RoleBinding", "rulecast-agent"): ["rulecast-agent"],
        ("RoleBinding", "rulecast-certs"): ["rulecast-certs"],
    }


def test_no_node_can_read_a_key() -> None:
    """A node may read each Secret that a pod on it names: so agents name none that has a key of worth."""
    agent = dict(pods(render()))["DaemonSet/rulecast-agent"]
    assert not any("secret" in volume for volume in agent["spec"]["volumes"])
    managed = render("mode-nftables", "certs-cert-manager")
    (ca,) = (
        each
        for each in dict(pods(managed))["DaemonSet/rulecast-agent"]["spec"]["volumes"]
        if each["name"] == "ca"
    )
    assert ca["secret"] == {"secretName": "rulecast-trust", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    assert "configMap" not in ca
    trust = find(managed, "Certificate", "rulecast-trust")["spec"]
    assert "server auth" not in trust["usages"]
    served = set(find(managed, "Certificate", "rulecast-server")["spec"]["dnsNames"])
    assert served.isdisjoint(trust["dnsNames"])
    assert served == set(certs_command.parse([]).terms.names)


def test_nothing_that_services_need_needs_a_service() -> None:
    objects = render()
    service = find(objects, "Service", "rulecast-server")
    assert service["spec"]["clusterIP"] == "None"
    assert not service["spec"].get("publishNotReadyAddresses")
    for name, pod in pods(objects):
        assert pod["spec"]["hostNetwork"] is True, name
        assert pod["spec"]["dnsPolicy"] == "Default", name
        assert pod["spec"]["priorityClassName"].startswith("system-"), name
        (config,) = (each for each in pod["spec"]["containers"][0]["envFrom"])
        assert config["configMapRef"]["name"].startswith("rulecast-cluster-")
    assert cluster_environment(objects).keys() == {
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "CLUSTER_CIDR",
    }


def test_agents_are_everywhere_and_servers_never_on_one_node() -> None:
    workloads = dict(pods(render()))
    assert workloads["DaemonSet/rulecast-agent"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    server = workloads["Deployment/rulecast-server"]["spec"]
    (apart,) = server["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    # Cordoned nodes are not tolerated: a drain would bring the replica back at once.
    assert not any(
        each.get("key") in (None, "node.kubernetes.io/unschedulable") for each in server["tolerations"]
    )


def container_root(tmp_path: Path, argv: list[str]) -> list[str]:
    """The arguments with each absolute path moved below a directory, and made there."""
    moved = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if value.startswith("/"):
            path = tmp_path / value.lstrip("/")
            if flag in ("--state-dir", "--manifests"):
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("x")
            value = str(path)
        moved.append(f"{flag}{equals}{value}")
    return moved


@every_choice
def test_every_command_line_is_accepted(components, tmp_path: Path) -> None:
    objects = render(*components)
    environment = cluster_environment(objects)
    seen = set()
    for _, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            command, *argv = container_root(tmp_path, arguments(container, environment))
            assert "command" not in container
            seen.add(command)
            if command == "server":
                server = server_settings.parse(argv)
                assert not server.insecure
                assert server.access.agent_accounts == ("rulecast/rulecast-agent",)
                assert (server.listen.port, server.http.port) == (9443, 9440)
            elif command == "agent":
                credentials = tmp_path / "account"
                credentials.mkdir(exist_ok=True)
                for name in ("token", "ca.crt"):
                    (credentials / name).write_text("x")
                argv.append(f"--apiserver-credentials={credentials}")
                agent = agent_settings.parse(argv, {"NODE_NAME": "n1", **environment})
                assert agent.warnings == ()
                assert agent.discovery is not None
                assert agent.tls is not None
                assert agent.tls.server_name in certs_command.parse([]).terms.names
                assert agent.mode == next(
                    (name.removeprefix("mode-") for name in components if name.startswith("mode-")),
                    "nftables",
                )
            else:
                assert command == "certs"
                assert certs_command.parse(argv).names.namespace == "rulecast"
    assert {"server", "agent"} <= seen
    assert ("certs" in seen) == ("certs-cert-manager" not in components)


def test_probes_ask_paths_that_answer_at_ports_that_listen() -> None:
    workloads = dict(pods(render()))
    for name, port in (("Deployment/rulecast-server", 9440), ("DaemonSet/rulecast-agent", 10256)):
        (container,) = workloads[name]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert f"--http=0.0.0.0:{port}" in container["args"]
        for probe, path in (
            ("startupProbe", "/livez"),
            ("livenessProbe", "/livez"),
            ("readinessProbe", "/readyz"),
        ):
            assert container[probe]["httpGet"]["path"] == path
            assert ports[container[probe]["httpGet"]["port"]] == port


def test_examples_and_manifests_are_yaml_without_duplicate_keys() -> None:
    for path in sorted(DEPLOY.rglob("*.yaml")):
        for document in yaml.compose_all(path.read_text(), Loader=yaml.SafeLoader):
            _no_duplicates(document, path)


def _no_duplicates(node: yaml.Node | None, path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), (path, keys)
        for _, value in node.value:
            _no_duplicates(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _no_duplicates(value, path)


def test_every_component_is_rendered_by_some_choice_and_named_in_the_documentation() -> None:
    there = {path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml")}
    assert {name for components in choices() for name in components} == there
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text() + (DEPLOY / "kustomization.yaml").read_text()
    for name in there:
        assert f"`{name}`" in text
        assert f"components/{name}" in text


def test_a_cluster_is_moved_node_by_node_by_one_label() -> None:
    moved = dict(pods(render(*choices()[0])))["DaemonSet/rulecast-agent"]["spec"]["nodeSelector"]
    everywhere = dict(pods(render()))["DaemonSet/rulecast-agent"]["spec"]["nodeSelector"]
    assert moved == {**everywhere, "rulecast/agent": "on"}
