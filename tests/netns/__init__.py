"""Packet tests: real server and agents in network namespaces, judged by what clients and backends see."""
