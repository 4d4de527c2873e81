import json
import os
from pathlib import Path

from swarm.simulation.status import ProcessConfig, append_json, read_json_lines


def test_config_survives_the_journey_to_the_child(tmp_path: Path) -> None:
    config = ProcessConfig(
        name="host-0", kind="host", directory=str(tmp_path), invite="secret", overrides={"a": {"b": 1}}
    )
    assert ProcessConfig.read(config.write()) == config


def test_config_with_its_invite_is_private(tmp_path: Path) -> None:
    file = ProcessConfig(name="x", kind="host", directory=str(tmp_path), invite="secret").write()
    shown_to_others = 0o077 if os.name == "posix" else 0
    assert os.stat(file).st_mode & shown_to_others == 0


def test_lines_are_read_once_each(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert read_json_lines(file) == ([], 0)
    append_json(file, {"a": 1})
    first, offset = read_json_lines(file)
    append_json(file, {"a": 2})
    second, end = read_json_lines(file, offset)
    assert (first, second) == ([{"a": 1}], [{"a": 2}])
    assert read_json_lines(file, end) == ([], end)


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": ')
    records, offset = read_json_lines(file)
    assert records == [{"a": 1}]
    with file.open("ab") as stream:
        stream.write(b"2}\n")
    assert read_json_lines(file, offset)[0] == [{"a": 2}]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"a": \n' + json.dumps({"a": 2}).encode() + b"\n")
    assert read_json_lines(file)[0] == [{"a": 2}]
