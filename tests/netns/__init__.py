"""Packet tests: real server and agents in network namespaces, judged by what clients and backends see."""

import pytest

pytest.register_assert_rewrite("tests.netns.cluster", "tests.netns.expect")
