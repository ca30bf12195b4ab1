"""run.json: what is kept of the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.run.facts import RunFacts, without_secrets
from distrain.coordinator.store.local_store import LocalStore
from distrain.coordinator.store.manifest import RunManifest

if TYPE_CHECKING:
    from pathlib import Path


def test_an_attempt_that_nobody_saw_ending_says_so_when_the_run_goes_on(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    first = {"attempt": 0, "started": 1.0, "ended": 2.0, "failure": "rank 1: no"}
    second = {"attempt": 1, "started": 3.0, "ended": None, "failure": None}
    store.write_manifest({"status": "running", "attempts": [first, second]})
    RunManifest(store, run_id="id", configs={}, known=RunFacts("train.py", {}).known).write("running")
    store.close()
    attempts = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert attempts == [first, {**second, "failure": "the process that called fit() died"}]


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ("train.py --api-key S --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --api_key=S --token S x", "train.py --api_key=*** --token *** x"),
        ("train.py -password S", "train.py -password ***"),
        ("train.py --use-auth --epochs 3", "train.py --use-auth --epochs 3"),
        ("train.py +logger.api_key=S lr=0.1", "train.py +logger.api_key=*** lr=0.1"),
        ("launch --env WANDB_API_KEY=S --set hf.token=S", "launch --env WANDB_API_KEY=*** --set hf.token=***"),
        ("train.py --store redis://me:S@host/0", "train.py --store redis://***@host/0"),
        ("train.py --max-tokens 512 --tokenizer x key y", "train.py --max-tokens 512 --tokenizer x key y"),
        ("run --set=token=S --env=HF_TOKEN=S", "run --set=token=*** --env=HF_TOKEN=***"),
        (
            "train.py --accessToken=S --tokens S --num-tokens=1e6",
            "train.py --accessToken=*** --tokens *** --num-tokens=1e6",
        ),
        ("train.py --secretKey S --APIKey S --authtoken=S", "train.py --secretKey *** --APIKey *** --authtoken=***"),
        ("train.py --pin_password=1234 --tokens 12", "train.py --pin_password=*** --tokens 12"),
        ("train.py --hub https://h/?lr=1&token=S&x=S", "train.py --hub https://h/?lr=1&token=***&x=S"),
        ("train.py --hub=https://me:S@h/x?sig=1", "train.py --hub=https://***@h/x?sig=***"),
        (
            "run --tracker wandb:project=p,api_key=S,mode=offline",
            "run --tracker wandb:project=p,api_key=***,mode=offline",
        ),
        ("train.py --num-key-value-heads 8 --token-len=512", "train.py --num-key-value-heads 8 --token-len=512"),
        ("train.py --use-auth-token true --token=None x", "train.py --use-auth-token true --token=None x"),
        ("train.py --token1 S --api_key_2=S", "train.py --token1 *** --api_key_2=***"),
        ("train.py --monkey=1 --author me --keyboard x", "train.py --monkey=1 --author me --keyboard x"),
    ],
)
def test_what_looks_secret_is_not_kept(argv: str, kept: str) -> None:
    assert " ".join(without_secrets(argv.split())) == kept


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("Authorization: Bearer S", "Authorization: *** ***"),
        ("--password=S with spaces, and = S", "--password=***"),
        ('{"token": "S", "lr": 0.1}', '{"token": "***", "lr": 0.1}'),
        ('{"token": "S\\"S", "lr": 0.1}', '{"token": "***", "lr": 0.1}'),
        ("{'hub': {'apiKey': 'S'}, 'lr': 0.1}", "{'hub': {'apiKey': '***'}, 'lr': 0.1}"),
        ("python train.py --api-key S --lr 0.1", "python train.py --api-key *** --lr 0.1"),
        ('args=["--api-key","S", "--lr", "0.1"]', 'args=["--api-key","***", "--lr", "0.1"]'),
        ("train.py --password 'S S' --lr 0.1", "train.py --password '***' --lr 0.1"),
        ("env HF_TOKEN=S docker exec -i {host}", "env HF_TOKEN=***"),
        ("ssh -o ProxyCommand=x", "ssh -o ProxyCommand=x"),
    ],
)
def test_what_looks_secret_within_one_argument_is_not_kept(word: str, kept: str) -> None:
    assert without_secrets([word]) == [kept]
