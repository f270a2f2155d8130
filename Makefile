# Two commands: `make demo` and `make test`. Each sets up what it needs.
PY := .venv/bin/python
# A group of tests may be skipped only where the machine cannot run it; REQUIRE=netns,vm makes such a skip a failure.
PROTO := protos/rulecast/v1/rules.proto
GENERATED := core/rulecast/v1/rules_pb2.py core/rulecast/v1/rules_pb2.pyi core/rulecast/v1/rules_pb2_grpc.py

.PHONY: help setup setup-vm demo test beside groups check unit netns vm lint types layers gen gen-check bench bench-fanout conformance conformance-source clean

help:
	@echo "make demo   a small cluster in network namespaces with real traffic (root)"
	@echo "make test   lint, types, layers, generated code, and every test"
	@echo "make vm     IPVS mode, in a virtual machine"
	@echo "make bench  the budgets, measured (root)"
	@echo "make bench-fanout  many agents on one server (root; AGENTS=N RATE=N SERVICES=N)"
	@echo "make conformance  random scenarios, judged by the real kube-proxy (root, Go; SEED=N replays one)"
	@echo "make conformance-source  the real apiserver and etcd as the server's source (Go)"
	@echo "make gen    regenerate the protobuf code"

setup:
	@.ci/setup

demo: setup
	@.venv/bin/rulecast demo

# The virtual machine has one processor and its tests mostly wait: they run beside the others. Its kernel is built
# in the time that those leave; what cannot be built here is told by the tests, skipped or failed by REQUIRE.
test: setup setup-vm
	@$(MAKE) --no-print-directory -j 2 beside groups

beside:
	@nice -n 19 tests/vm/build-kernel >/dev/null 2>&1 || true
	$(PY) -m pytest -q tests/vm

groups:
	@MAKEFLAGS="$(filter-out -j% --jobserver%,$(MAKEFLAGS))" $(MAKE) check unit netns

check: lint types layers gen-check

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: setup
	.venv/bin/mypy
	.venv/bin/mypy bench

layers: setup
	.venv/bin/lint-imports

gen: setup
	$(PY) -m grpc_tools.protoc -I protos --python_out=core --pyi_out=core --grpc_python_out=core $(PROTO)

# Proof that the checked-in code is what the IDL generates.
gen-check: setup
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	$(PY) -m grpc_tools.protoc -I protos --python_out=$$dir --pyi_out=$$dir --grpc_python_out=$$dir $(PROTO) && \
	for f in $(GENERATED); do cmp "$$f" "$$dir/$${f#core/}" || { echo "$$f is stale: run make gen"; exit 1; }; done

unit: setup
	$(PY) -m pytest -q -n 2 --dist loadfile -m "not netns and not realapi and not vm"

# The tables of packets once more in each of the other modes, side by side: they mostly wait.
netns: setup
	$(PY) -m pytest -q -m netns
	@$(MAKE) --no-print-directory -j 2 --output-sync=target tables-iptables-nft tables-iptables-legacy

tables-%:
	MODE=$* $(PY) -m pytest -q $(addprefix tests/netns/test_,semantics.py variants.py changes.py flows.py odd_packets.py)

# IPVS mode, in a virtual machine whose kernel has it (built once, into build/vm: some minutes).
vm: setup-vm
	$(PY) -m pytest -q tests/vm

setup-vm: setup
	@.ci/setup vm

bench: setup
	$(PY) -m bench --save

# AGENTS, RATE (changes a second), SERVICES, SECONDS; writes bench/results/fanout.json.
bench-fanout: setup
	@$(PY) -m bench fanout --save --agents $(or $(AGENTS),1000) $(if $(RATE),--rate $(RATE)) \
		$(if $(SERVICES),--services $(SERVICES)) $(if $(SECONDS),--seconds $(SECONDS))

# The real parts are built once, into build/. MODE (nftables, iptables, iptables-legacy, ipvs), SEED, COUNT, and
# ARGS for what else the command takes. IPVS is played in the virtual machine: slower, so less of it.
JUDGE := tests/conformance/build-judge build
PLAY = $(PY) -m tests.conformance --kube-proxy $$binary --mode $(or $(MODE),nftables) \
	$(if $(SEED),--seed $(SEED) --count $(or $(COUNT),1),--count $(or $(COUNT),300)) $(ARGS)
ifeq ($(MODE),ipvs)
conformance: override COUNT := $(or $(COUNT),$(if $(SEED),1,4))
conformance: override ARGS := --lanes 1 --services 8 --evidence /tmp/conformance $(ARGS)
endif
conformance: setup
	@binary=$$($(JUDGE) kube-proxy) && \
	$(if $(filter ipvs,$(MODE)),VM_TIMEOUT=3600 $(PY) -m tests.vm.machine "SLOWNESS=3 $(PLAY)",$(PLAY))
	@$(if $(SEED),true,$(MAKE) conformance-source)

# The real apiserver and etcd as the server's source.
conformance-source: setup
	@apiserver=$$($(JUDGE) kube-apiserver) && etcd=$$($(JUDGE) etcd) && \
	KUBE_APISERVER=$$apiserver ETCD=$$etcd $(PY) -m pytest -q tests/realapi

clean:
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
