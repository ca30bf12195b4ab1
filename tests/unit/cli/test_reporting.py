"""``distrain report``: what is packed, what is left out, and that no secret is in it."""

from __future__ import annotations

import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import fsspec
import pytest

from distrain.cli import reporting
from distrain.cli.main import run_main
from distrain.system.secrets import hidden
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path

SECRETS = [
    "HF_TOKEN=s3cr3t",
    "password: s3cr3t",
    "aws_secret_access_key = s3cr3t",
    "{'api_key': 's3cr3t'}",
    'apiKey="s3cr3t"',
    "Authorization: Bearer s3cr3t",
    "curl -H 'authorization: Basic s3cr3t'",
    "train.py --db-password s3cr3t",
    "train.py --env COLOUR=s3cr3t",
    "postgres://me:s3cr3t@host/db",
    "https://bucket/x?X-Amz-Signature=s3cr3t&part=1",
    "-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END RSA PRIVATE KEY-----",
    "AKIAIOSFODNN7EXAMPLE",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmN",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_masked(text: str) -> None:
    found = hidden(f"before {text} after 1")
    assert "***" in found
    assert "s3cr3t" not in found
    assert text not in found
    assert (found.split()[0], found.split()[-1]) == ("before", "1")


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'loss'",
        "tokens=128 token_count=5 tokenizer=gpt2 lr=1e-3",
        "--num-key-value-heads 8 --lr 0.1",
        "git dd59244bfa64c4851531abe2842abe61b75e9d1c",
        "s3://bucket/runs and http://host:80/x",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert hidden(text) == text


def test_json_is_masked_by_its_names_and_stays_json() -> None:
    quoted = json.dumps({"api_key": "s3cr3t", "n": 1})
    plain = {"password": "s3cr3t", "argv": ["--token", "s3cr3t", "d"], "line": f"got\nhf_{'x' * 20} and {quoted}"}
    assert json.loads(hidden(json.dumps(plain))) == {
        "password": "***", "argv": ["--token", "***", "d"], "line": 'got\n*** and {"api_key": "***", "n": 1}',
    }  # fmt: skip


def test_a_list_and_an_object_with_a_secret_name_are_masked() -> None:
    found = hidden(
        json.dumps({"tokens": ["s3cr3t", "s3cr3t"], "credentials": {"user": "s3cr3t", "x": "s3cr3t"}, "n": 1})
    )
    assert "s3cr3t" not in found
    assert '"n": 1' in found


def make_failed_run(storage: Path) -> Path:
    config = {"api_key": "s3cr3t", "lr": 0.1}
    make_run(storage, "run", status="failed", argv=["train.py", "--password", "s3cr3t"], train_loop_config=config)
    run = storage / "run"
    for name, text in {
        "error.json": json.dumps({"message": "boom with token=s3cr3t and from-the-environment"}),
        "events.jsonl": '{"time": 1, "event": "hang", "attempt": 0, "where": "password: s3cr3t"}\n',
        "logs/attempt_0/rank_0.log": "".join(f"line {n}\n" for n in range(1000)) + "from-the-environment\n",
        "evidence/attempt_0/stacks/rank_0.txt": "in f at a.py:1",
        "evidence/attempt_0/memory/rank_0.pickle": "a path with s3cr3t",
        "evidence/attempt_0/core": "a core dump",
        "checkpoint_000000/model.pt": "weights",
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


def test_a_report_has_what_helps_and_neither_secrets_nor_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_ACCESS_KEY", "from-the-environment")
    make_failed_run(tmp_path / "runs")
    assert run_main(["report", "run", "--storage-path", "runs"], []) == 0
    archive = tmp_path / "distrain-report-run.tar.gz"
    with tarfile.open(archive) as packed:
        texts = {member.name: packed.extractfile(member).read().decode() for member in packed}  # type: ignore[union-attr]
    assert {name.partition("/")[2] for name in texts} >= {
        "README.txt", "show.txt", "versions.txt", "run.json", "error.json", "events.jsonl",
        "evidence/attempt_0/stacks/rank_0.txt", "logs/attempt_0/rank_0.log",
    }  # fmt: skip
    assert not [name for name in texts if "core" in name or "checkpoint" in name or "memory" in name]
    for name, text in texts.items():
        assert "s3cr3t" not in text, name
        assert "from-the-environment" not in text, name
    log = texts["distrain-report-run/logs/attempt_0/rank_0.log"].splitlines()
    assert (len(log), log[-1]) == (200, "***")
    assert "MY_ACCESS_KEY" in texts["distrain-report-run/versions.txt"]
    shown = capsys.readouterr().out
    assert shown.startswith("wrote distrain-report-run.tar.gz (")
    assert "  error.json\n" in shown
    left_out = "secrets in it can't be masked; check it before you send it"
    assert f"left out: evidence/attempt_0/memory/rank_0.pickle: {left_out}\n" in shown
    assert "Look through it before you send it." in shown


def test_files_of_a_remote_run_that_are_too_large_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_failed_run(tmp_path / "runs")
    (run / "metrics.jsonl").write_text("x" * 100_000)
    storage = fsspec.filesystem("memory")
    storage.put(str(tmp_path / "runs"), "/reported", recursive=True)
    monkeypatch.setattr(reporting, "_MOST_BYTES", 100_000)
    output = tmp_path / "report.tar.gz"
    assert run_main(["report", "memory://reported/run", "-o", str(output)], []) == 0
    storage.rm("/reported", recursive=True)
    with tarfile.open(output) as packed:
        names = [member.name for member in packed]
        readme = packed.extractfile(names[0]).read().decode()  # type: ignore[union-attr]
    assert "distrain-report-run/logs/attempt_0/rank_0.log" in names
    assert "distrain-report-run/metrics.jsonl" not in names
    for text in (readme, capsys.readouterr().out):
        assert "left out: metrics.jsonl: too large (" in text


COMMANDS = {
    "report": ["report", "run", "--storage-path", "runs", "-o"],
    "page": ["page", "run", "--storage-path", "runs", "-o"],
    "board": ["board", "runs", "--export"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_pipe_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, through: str) -> None:
    monkeypatch.chdir(tmp_path)
    make_failed_run(tmp_path / "runs")
    pipe, output = tmp_path / "pipe.html", tmp_path / "link.html" if through == "a link" else tmp_path / "pipe.html"
    os.mkfifo(pipe)
    if output != pipe:
        output.symlink_to(pipe)
    reader, writer = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY)  # nobody waits for another
    os.set_blocking(reader, True)
    with open(reader, "rb") as file, ThreadPoolExecutor() as threads:
        reading = threads.submit(file.read)
        code = run_main([*COMMANDS[command], str(output)], [])
        os.close(writer)
        said = reading.result()
    assert code == 0
    assert said.startswith(b"\x1f\x8b" if command == "report" else b"<!DOCTYPE html>")
    assert pipe.is_fifo()
    assert output.is_symlink() == (through == "a link")
