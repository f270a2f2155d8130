PY := .venv/bin/python
.PHONY: setup gen lint

gen:
	$(PY) -m grpc_tools.protoc -I protos --python_out=core --pyi_out=core --grpc_python_out=core protos/rulecast/v1/rules.proto
