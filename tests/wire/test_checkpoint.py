"""The state on disk is whole and our own, or it is not used."""

import asyncio
import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rulecast_agent.feed.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFile,
    CheckpointWriter,
    decode_checkpoint,
    encode_checkpoint,
)
from tests.wire import values
from tests.wire.waiting import eventually

CONTENTS = [("fleet", list(values.fleet_of(30).items())), ("zone/", []), ("node/n1", [])]


@given(values.assignments(most=12))
def test_what_is_saved_is_what_is_read(assignment) -> None:
    contents = [
        (scope, [(resource, value) for resource, value in resources.items() if value is not None])
        for scope, resources in assignment.items()
    ]
    saved = Checkpoint(node_name="n1", saved_at=12.5, contents=contents)
    read = decode_checkpoint(encode_checkpoint(saved))
    assert (read.node_name, read.saved_at) == ("n1", 12.5)
    assert {scope: dict(each) for scope, each in read.contents} == {
        scope: dict(each) for scope, each in contents
    }


DATA = encode_checkpoint(Checkpoint(node_name="n1", saved_at=1.0, contents=CONTENTS))


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(where: int, change: int) -> None:
    data = bytearray(DATA)
    data[where] ^= change
    with pytest.raises(CheckpointError):
        decode_checkpoint(bytes(data))


@given(st.integers(0, len(DATA) - 1))
def test_no_cut_file_goes_unnoticed(length: int) -> None:
    with pytest.raises(CheckpointError):
        decode_checkpoint(DATA[:length])
    with pytest.raises(CheckpointError):
        decode_checkpoint(DATA + DATA[:1])


def test_a_file_is_replaced_as_a_whole(tmp_path) -> None:
    file = CheckpointFile(tmp_path / "new" / "directory", "n1")
    assert file.load() is None
    file.save(CONTENTS, 1.0)
    file.save(CONTENTS[:1], 2.0)
    assert file.load().saved_at == 2.0
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    assert file.path.stat().st_mode & 0o077 == 0


def test_another_nodes_file_is_refused_by_name(tmp_path) -> None:
    CheckpointFile(tmp_path, "n2").save(CONTENTS, 1.0)
    with pytest.raises(CheckpointError, match=r"of node 'n2', not of 'n1'"):
        CheckpointFile(tmp_path, "n1").load()


def test_a_failing_save_leaves_the_last_good_file_and_is_told(tmp_path, monkeypatch) -> None:
    file = CheckpointFile(tmp_path, "n1")
    file.save(CONTENTS, 1.0)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        file.save(CONTENTS, 2.0)
    assert file.load().saved_at == 1.0
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


@pytest.mark.asyncio
async def test_changes_in_quick_succession_are_saved_together_and_the_last_one_at_the_end(tmp_path) -> None:
    contents = CONTENTS[:1]
    writer = CheckpointWriter(CheckpointFile(tmp_path, "n1"), lambda: contents, interval=60.0)
    task = asyncio.create_task(writer.run())
    writer.changed()
    await eventually(lambda: writer.saves == 1)
    contents = CONTENTS
    for _ in range(10):
        writer.changed()
        await asyncio.sleep(0)
    assert writer.saves == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert writer.saves == 2
    assert len(CheckpointFile(tmp_path, "n1").load().contents) == 3


@pytest.mark.asyncio
async def test_a_save_that_fails_is_reported_and_tried_again(tmp_path, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    writer = CheckpointWriter(CheckpointFile(blocked, "n1"), lambda: CONTENTS, interval=0.0)
    task = asyncio.create_task(writer.run())
    for attempt in (1, 2):
        writer.changed()
        await eventually(lambda: writer.failures >= attempt)  # noqa: B023
    assert writer.error
    assert len([record for record in caplog.records if "cannot be saved" in record.message]) == 1
    blocked.unlink()
    writer.changed()
    await eventually(lambda: writer.saves == 1)
    assert not writer.error
    task.cancel()
    await asyncio.wait((task,))


@pytest.mark.asyncio
async def test_a_clock_that_is_set_back_keeps_nothing_from_being_saved(tmp_path) -> None:
    times = iter((1000.0, 10.0, 11.0))
    writer = CheckpointWriter(
        CheckpointFile(tmp_path, "n1"), lambda: CONTENTS, interval=0.0, clock=lambda: next(times)
    )
    task = asyncio.create_task(writer.run())
    for saves in (1, 2, 3):
        writer.changed()
        await eventually(lambda: writer.saves == saves)  # noqa: B023
    assert writer.saved_at == 11.0
    task.cancel()
    await asyncio.wait((task,))
