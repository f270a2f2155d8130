"""IPVS mode with the capabilities that deploy/ gives the agent, once the modules are there."""

import pytest

from tests.deploy.manifests import KUBECTL, pods, render
from tests.vm import machine

_READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:10256/readyz', timeout=2)"
_AGENT = f"""
setpriv --inh-caps=-all --bounding-set=-all$CAPABILITIES --no-new-privs \\
    .venv/bin/python -m rulecast.cli agent --standalone --manifests deploy/examples --node-name n1 \\
    --cluster-cidr 10.244.0.0/16 --state-dir /tmp/state $FLAGS >/tmp/log 2>&1 &
agent=$!
for second in $(seq 60); do
    sleep 1
    kill -0 $agent || break
    .venv/bin/python -c "{_READY}" 2>/dev/null && break
done
cat /proc/net/ip_vs /tmp/log
kill $agent
wait $agent
"""
_VIP = "0A600014:0050"


@pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed")
def test_the_rights_of_the_manifest_are_enough(booted: None) -> None:
    pod = dict(pods(render("mode-ipvs", "certs-self-signed")))["DaemonSet/rulecast-agent"]
    (container,) = pod["spec"]["containers"]
    given = container["securityContext"]["capabilities"]["add"]
    environment = {
        "CAPABILITIES": "".join(f",+{name.lower()}" for name in given),
        "FLAGS": " ".join(each for each in container["args"] if each.startswith("--mode")),
    }
    result = machine.run(_AGENT, timeout=120, environment=environment)
    assert result.code == 0, result.output
    assert _VIP in result.output
    assert "Traceback" not in result.output
