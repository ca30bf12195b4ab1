"""Values that look like secrets are masked."""

from __future__ import annotations

import json

import pytest

from distrain.storage.secrets import hidden

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
    '{"tokens": ["s3cr3t", "s3cr3t"], "credentials": {"user": "s3cr3t"}}',
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
